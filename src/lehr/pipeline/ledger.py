"""The ledger: what each stage read, did and produced; whether it was promoted, and why."""

from __future__ import annotations

import html
import time
from pathlib import Path
from typing import Any

from lehr.pipeline.files import read_json, write_json


class Ledger:
    """ledger.json in memory; written whole after every change."""

    def __init__(self, folder: Path, head: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.data: dict[str, Any] = {
            "name": "",
            "model": "",
            "output": folder.name,
            "started": time.time(),
            "finished": None,
            "seconds": 0.0,  # wall time of this run, with its interrupted starts
            "seconds_of_stages": 0.0,  # what the stages took when they were made
            "peak_memory_gib": None,
            "recipe_hash": "",
            "versions": {},
            "machine": {},
            "stages": [],
            "verdict": "running",
            "sentence": "",
            "promoted_from": None,
            "exports": [],
        }
        self.data.update(head or {})

    @classmethod
    def read(cls, folder: Path) -> Ledger | None:
        """The ledger in `folder`, or None."""
        found = read_json(folder / "ledger.json")
        return cls(folder, found) if isinstance(found, dict) else None

    def save(self) -> None:
        write_json(self.folder / "ledger.json", self.data)

    def stage(self, entry: dict[str, Any]) -> None:
        """Add or replace the entry of one stage."""
        stages = [old for old in self.data["stages"] if old["folder"] != entry["folder"]]
        stages.append(entry)
        self.data["stages"] = sorted(stages, key=lambda one: str(one["folder"]))
        self.save()

    @property
    def stages(self) -> list[dict[str, Any]]:
        return list(self.data["stages"])

    @property
    def verdict(self) -> str:
        """promoted, refused, undetermined, running, interrupted, diverged or failed."""
        return str(self.data["verdict"])

    @property
    def sentence(self) -> str:
        return str(self.data["sentence"])

    def __repr__(self) -> str:
        return f"Ledger({self.data['name']}: {self.sentence or self.verdict})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(str(stage['name']))}</td>"
            f"<td>{'promoted' if stage['promoted'] else 'parent kept'}</td>"
            f"<td>{html.escape(str(stage['why']))}</td></tr>"
            for stage in self.stages
        )
        sentence = html.escape(self.sentence or self.verdict)
        return f"<p><b>{sentence}</b></p><table>{rows}</table>"
