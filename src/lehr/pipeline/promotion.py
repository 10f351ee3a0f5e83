"""What becomes of a stage: promoted into model/, or its parent kept, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.evaluation.gates import Verdict
from lehr.pipeline.files import link_weights, read_json, write_folder, write_json, write_text
from lehr.pipeline.judging import Judgement
from lehr.pipeline.states import State
from lehr.report.card import lineage, model_card
from lehr.report.wording import gate_sentence


def verdict_on(judgement: Judgement, undetermined: str) -> tuple[bool, str, str]:
    """(promoted, verdict, why). `undetermined: promote` is said in the reason."""
    if judgement.refused:
        said = "; ".join(gate_words(one) for one in judgement.refused[:3])
        return False, "refused", f"{said}: kept the parent"
    if judgement.undetermined:
        said = "; ".join(gate_words(one) for one in judgement.undetermined[:3])
        if undetermined == "promote":
            return True, "promoted", f"promoted although undetermined (the recipe says so): {said}"
        return False, "undetermined", f"undetermined: {said}: kept the parent"
    gains = [one for one in judgement.verdicts if one.gate.kind == "improve"]
    said = "; ".join(gate_words(one) for one in gains)
    return True, "promoted", f"promoted: {said}" if said else "promoted: nothing was gated"


def gate_words(verdict: Verdict) -> str:
    """A gate as the ledger says it."""
    return gate_sentence(verdict.as_json(), needs=True, minus="-")


def promote(run_folder: Path, state: State, stage_folder: str, origin: str) -> None:
    """Put the state's files into model/, whole or not at all, with what it is.

    origin  hash of what an export needs beside the state: base model, template, date
    """

    def fill(aside: Path) -> None:
        for path in state.files.iterdir():
            link_weights(path, aside / path.name)
        mark = {"promoted_from": stage_folder, "key": state.key, "origin": origin}
        write_json(aside / "lehr.json", mark)

    write_folder(run_folder / "model", fill)


def describe(run_folder: Path) -> None:
    """Model card and lineage of model/, from the files of the run.

    What model/ itself is was written when it was promoted, and stays.
    """
    if (run_folder / "model").is_dir():
        write_text(run_folder / "model" / "README.md", model_card(run_folder))
        mark = promotion_mark(run_folder)
        write_json(run_folder / "model" / "lehr.json", {**lineage(run_folder), **mark})


def promotion_mark(run_folder: Path) -> dict[str, str]:
    """What `promote` wrote of model/: its stage's folder, its key, its origin."""
    found = read_json(run_folder / "model" / "lehr.json")
    known = found if isinstance(found, dict) else {}
    return {
        name: known[name]
        for name in ("promoted_from", "key", "origin")
        if isinstance(known.get(name), str)
    }


def sentence(outcomes: list[Any], planned: int) -> tuple[str, str]:
    """(verdict, one sentence) of a whole run."""
    promoted = [one for one in outcomes if one.promoted]
    kept = [one for one in outcomes if not one.promoted]
    last = outcomes[-1]
    if not promoted:
        text = f"Nothing was promoted: {last.entry['why']}."
        return last.verdict, text
    best = promoted[-1].entry
    text = f"Promoted {best['name']}"
    gain = best["why"].removeprefix("promoted: ")
    if gain and gain != best["why"]:
        text += f" ({gain})"
    elif gain.startswith("promoted although"):
        text += gain.removeprefix("promoted")
    if kept:
        names = ", ".join(one.entry["name"] for one in kept)
        text += (
            f"; refused {names}"
            if all(o.verdict == "refused" for o in kept)
            else f"; kept the parent of {names}"
        )
    if not last.promoted:
        return last.verdict, text + "."
    if len(outcomes) < planned:
        return last.verdict, text + "."
    return "promoted", text + "."
