"""A signal at any moment of the command: status 130, no traceback, one object with --json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = {
    "model": "tiny:100k",
    "template": "chatml",
    "adapter": {"kind": "none"},
    "data": {"chats": {"path": "chats.jsonl", "holdout": 2}},
    "stages": [{"sft": {"data": "chats", "max_length": 64, "max_updates": 100000}}],
    "gates": "none",
}
# The command announces a moment: when this module is imported, it signals itself.
AT_IMPORT = """
import importlib.abc, os, sys
class Moment(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Moment())
sys.argv = ["lehr", "run", "recipe.yaml", "--json"]
from lehr.__main__ import main
main()
"""


def answered(status: int, out: str, err: str) -> None:
    assert status == 130, err
    assert "Traceback" not in err and "bug" not in err
    assert json.loads(out)["error"]["kind"] == "interrupted"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    row = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}
    lines = [json.dumps(row).replace("a b", f"a {n} b") for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module", ["lehr.cli.main", "typer", "lehr.recipe.loading", "torch", "lehr.pipeline.run"]
)
def test_a_signal_while_modules_load(place, module, number):
    code = AT_IMPORT.format(module=module, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120
    )
    answered(done.returncode, done.stdout, done.stderr)


def test_two_signals_are_one_answer(place):
    command = [sys.executable, "-m", "lehr", "run", "recipe.yaml", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=place, **pipes) as child:
        deadline = time.monotonic() + 120
        while not (place / "runs").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(2):
            os.kill(child.pid, signal.SIGTERM)
        out, err = child.communicate(timeout=120)
    answered(child.returncode, out, err)
