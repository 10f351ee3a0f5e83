"""Fixtures of tests that run recipes: a base model, data, one finished run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.pipeline.small import (
    Heard,
    go,
    lora_recipe,
    measured_once,
    save_base,
    write_data,
    write_recipe,
)

from lehr.diagnosis.machine import Machine
from lehr.pipeline import judging, own_text, parity, planning, showcase, stage_run, workbench
from lehr.pipeline import run as run_module
from lehr.pipeline.ledger import Ledger

WHOLE = (
    (run_module, "export_promoted", run_module.export_promoted),
    (stage_run, "answers", stage_run.answers),
    (showcase, "answers", showcase.answers),
    (judging.Judge, "kl", judging.Judge.kl),
)


@pytest.fixture(scope="session", autouse=True)
def one_measurement() -> Iterator[None]:
    """The machine's speed is measured once, not in every run; one thread; short answers."""

    def known(measure: bool = False, device: torch.device | None = None) -> Machine:
        return replace(measured_once(), threads=torch.get_num_threads())

    patch = pytest.MonkeyPatch()
    patch.setattr(planning, "describe_machine", known)
    patch.setattr(os, "fsync", lambda _: None)  # against a loss of power, which no test has
    patch.setattr(showcase, "ANSWER_TOKENS", 3)
    patch.setattr(workbench.gc, "collect", lambda: 0)  # half a second in a process full of tests
    patch.setattr(own_text, "TEXT_TOKENS", 12)
    patch.setattr(parity, "GREEDY_TOKENS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    patch.undo()


@pytest.fixture(scope="module")
def lean() -> Iterator[None]:
    """Runs without what many tests do not look at: exports, answers that are only shown."""
    patch = pytest.MonkeyPatch()
    patch.setattr(run_module, "export_promoted", lambda *_: ([], ""))
    patch.setattr(stage_run, "answers", lambda *_: [])
    patch.setattr(showcase, "answers", lambda *_: [])
    patch.setattr(judging.Judge, "kl", lambda *_: None)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def saved_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def work(tmp_path: Path, saved_base: Path) -> Path:
    """A folder with the base and the data files."""
    write_data(tmp_path)
    shutil.copytree(saved_base, tmp_path / "base")
    return tmp_path


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, saved_base: Path
) -> tuple[Path, Ledger, Heard]:
    """One finished run of the small LoRA recipe: its recipe file, ledger and events."""
    folder = tmp_path_factory.mktemp("finished")
    write_data(folder)
    shutil.copytree(saved_base, folder / "base")
    path = write_recipe(folder, lora_recipe())
    with pytest.MonkeyPatch.context() as patch:  # the first to ask may be a `lean` module
        for place, name, real in WHOLE:
            patch.setattr(place, name, real)
        ledger, _, heard = go(path)
    return path, ledger, heard


@pytest.fixture
def finished(finished_once: tuple[Path, Ledger, Heard], tmp_path: Path) -> Path:
    """The recipe file of a copy of the finished run, free to be spoilt."""
    folder = tmp_path / "copy"
    shutil.copytree(finished_once[0].parent, folder)
    return folder / "recipe.yaml"
