"""What the README says to type can be typed, and the recipes to copy load."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import chat_rows, pair_rows, write_rows

import lehr
from lehr.cli.main import app, main
from lehr.recipe.loading import load_recipe, loads
from lehr.report.explain import topics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VERBS = {info.name or info.callback.__name__ for info in app.registered_commands}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_there_are_commands():
    assert "make demo" in commands() and len(commands()) >= 4


@pytest.mark.parametrize("command", commands())
def test_every_command_exists(command, monkeypatch, capsys):
    words = shlex.split(command)
    if words[0] == "make":
        assert set(words[1:]) <= targets()
        return
    if words[0] in ("cd", "git"):
        return
    assert Path(words[0]).name == "lehr" and words[1] in VERBS, command
    for word in words[2:]:
        if word.endswith((".yaml", ".yml")):
            monkeypatch.chdir(ROOT)
            load_recipe(word)
        elif word.startswith("--"):
            with pytest.raises(SystemExit):
                main([words[1], "--help"])
            assert word in capsys.readouterr().out


def test_cheap_commands_run(capsys):
    for words in (["--help"], ["fetch"], ["explain"], ["explain", "packing"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert not left.value.code
    assert "packing" in capsys.readouterr().out


def test_the_table_of_verbs_is_complete():
    named = set(re.findall(r"^\| `lehr ([a-z]+)", README, re.MULTILINE))
    later = {"serve", "lab"}
    assert named | later == VERBS
    assert all(f"`lehr {verb}`" in README for verb in later)


def test_options_in_the_text_exist(capsys):
    for verb, option in re.findall(r"`lehr ([a-z]+)[^`\n]*?(--[a-z]+)", README):
        if verb in VERBS:
            with pytest.raises(SystemExit):
                main([verb, "--help"])
            assert option in capsys.readouterr().out, f"lehr {verb} {option}"


def test_the_recipe_in_the_text_loads(tmp_path):
    write_rows(tmp_path / "chats.jsonl", chat_rows())
    write_rows(tmp_path / "pairs.jsonl", pair_rows())
    [text] = blocks("yaml")
    recipe = loads(text, tmp_path)
    assert [stage.kind for stage in recipe.stages] == ["sft", "preference"]


def test_functions_in_the_text_exist():
    for name in re.findall(r"lehr\.([a-z_]+)\(", README):
        assert callable(getattr(lehr, name))
    assert all(callable(getattr(lehr, name)) for name in lehr.__all__)


def test_files_that_the_text_names_exist():
    for name in re.findall(r"`((?:docs|tests|examples|benchmarks)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name
    tree = README.split("## Where things are", 1)[1]
    for folder in re.findall(r"^  ([a-z]+)/ ", tree, re.MULTILINE):
        assert (ROOT / "src" / "lehr" / folder).is_dir(), folder


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_example_loads(path):
    assert load_recipe(path).stages


def test_the_demo_of_the_package_is_the_one_to_copy():
    packaged = ROOT / "src" / "lehr" / "cli" / "demo.yaml"
    assert (ROOT / "examples" / "demo.yaml").read_text() == packaged.read_text()


def test_pages_that_texts_send_people_to_exist():
    known: Any = {name for name, _ in topics()}
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {
        topic
        for path in sources
        for topic in re.findall(r"lehr explain ([a-z][a-z-]+)", path.read_text(encoding="utf-8"))
    }
    assert named and named <= known, named - known


def test_the_package_shows_its_verbs_and_its_version(capsys):
    assert {"run", "plan", "audit", "evaluate", "load_recipe"} <= set(dir(lehr))
    assert "import_module" not in dir(lehr)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"lehr {lehr.__version__}"
