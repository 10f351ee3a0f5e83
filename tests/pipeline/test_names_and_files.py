"""Names, paths and files as users have them: told what is wrong, never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.pipeline.small import chat_rows, write_rows

from lehr.cli.main import main
from lehr.data.audit import findings
from lehr.data.sources import read_source
from lehr.errors import RecipeError
from lehr.pipeline.auditing import audit
from lehr.pipeline.drafting import draft_recipe
from lehr.recipe.loading import load_recipe
from lehr.recipe.positions import parse

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def status(capsys, *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return int(left.value.code or 0), said.out + said.err


# -- audit --clean ------------------------------------------------------------


def test_clean_never_overwrites(tmp_path, capsys):
    data = write_rows(tmp_path / "a.jsonl", chat_rows(4))
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    before = data.read_bytes()
    for target in (data, other, tmp_path, tmp_path / "link"):
        code, said = status(capsys, "audit", data, "--clean", target)
        assert code == 2 and "nothing is overwritten" in said
    for target in (other / "x.jsonl", Path("/proc/zz/y.jsonl"), tmp_path / ("x" * 300)):
        assert status(capsys, "audit", data, "--clean", target)[0] == 2
    assert data.read_bytes() == before and other.read_text() == "mine"
    made = tmp_path / "deep" / "new.jsonl"
    assert status(capsys, "audit", data, "--clean", made)[0] == 0
    assert len(made.read_text().splitlines()) == 4
    assert [one.name for one in made.parent.iterdir()] == ["new.jsonl"], "nothing is left aside"


# -- damaged model folders ----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "3"),
        ("config.json", '{"model_type": 3}'),
        ("generation_config.json", "[]"),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [1, "x"]}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "garbage"),
    ],
)
def test_audit_refuses_a_damaged_model(tmp_path, saved_base, name, text):
    base = shutil.copytree(saved_base, tmp_path / "base")
    data = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    assert audit([data], model=str(base)).supervised_tokens
    (base / name).write_text(text)
    with pytest.raises(RecipeError):
        audit([data], model=str(base))


def test_audit_of_a_model_without_a_generation_config(tmp_path, saved_base):
    base = shutil.copytree(saved_base, tmp_path / "base")
    (base / "generation_config.json").unlink()
    data = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    assert audit([data], model=str(base)).supervised_tokens


def test_an_embedding_that_is_too_small_is_refused(tmp_path, saved_base, capsys):
    from transformers import AutoModelForCausalLM

    base = shutil.copytree(saved_base, tmp_path / "base")
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    network.resize_token_embeddings(100, mean_resizing=False)
    network.save_pretrained(base)
    data = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    for words in (("audit", data, "--model", base), ("chat", base, "--prompt", "a"),
                  ("evaluate", base, "--data", data)):  # fmt: skip
        code, said = status(capsys, *words)
        assert code == 2 and "there are 100 rows" in said.replace("\n", " ")


# -- bytes that are no text ---------------------------------------------------


def test_arguments_that_are_no_text_are_refused(tmp_path, saved_base, capsys):
    bad = "a\udcff"
    data = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    for words in (
        ("chat", saved_base, "--prompt", bad),
        ("run", bad),
        ("run", tmp_path / "r.yaml", "--set", f"model={bad}"),
        ("audit", data, "--clean", tmp_path / bad),
        ("plan", data, "--model", bad),
        ("explain", bad),
    ):
        code, said = status(capsys, *words, "--json")
        assert code == 2 and "UTF-8" in said


def test_a_python_caller_is_told_too(saved_base):
    from lehr.cli.conversation import answer_once, converse

    for call in (answer_once, lambda *a: converse(a[0], a[1], a[2], a[3])):
        with pytest.raises(RecipeError, match="UTF-8"):
            call([str(saved_base)], "auto", "a\udcff", 4)


def test_names_that_no_file_can_have(tmp_path, saved_base, capsys):
    long = "x" * 5000
    data = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    for words in (
        ("run", long),
        ("run", data / "r.yaml"),
        ("audit", long),
        ("audit", data, "--model", long),
        ("audit", data, "--model", saved_base, "--template", long),
        ("plan", data, "--model", "tiny:100k", "--out", long),
        ("plan", data, "--model", "tiny:100k", "--out", "/proc/zz/y.yaml"),
        ("plan", data, "--model", "tiny:100k", "--out", data / "y.yaml"),
        ("evaluate", long),
        ("chat", long, "--prompt", "a"),
        ("export", long),
    ):
        assert status(capsys, *words)[0] == 2, words


# -- parquet ------------------------------------------------------------------


def test_a_column_that_nobody_needs_stops_no_row(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array([f"row {n}" for n in range(600)])
    odd = {
        "when": pa.array([2**62] * 600, pa.timestamp("us")),
        "long": pa.array([2**62 + 1] * 600, pa.duration("ns")),
        "zone": pa.array([0] * 600, pa.timestamp("us", tz="No/Where")),
        "deep": pa.array([{"at": 2**62}] * 600, pa.struct([("at", pa.timestamp("us"))])),
        "fine": pa.array([{"at": None}] * 600, pa.struct([("at", pa.timestamp("us"))])),
    }
    pq.write_table(pa.table({"text": texts, **odd}), path)
    rows = read_source("a", [path])
    assert len(rows.examples) == 600 and not rows.dropped
    assert rows.examples[599].text == "row 599"
    assert any("column when: values that Python cannot hold" in note for note in rows.notes)


def test_two_columns_of_one_name_are_noted(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [pa.array(["first"]), pa.array(["second"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), path)
    rows = read_source("a", [path])
    assert [one.text for one in rows.examples] == ["second"]
    assert any("two columns have the same name" in note for note in rows.notes)


# -- YAML ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["!!omap [a: b]", "!!set {a, b}", "!!pairs [a: b]", "!!binary aGk=", "!!str {a: b}",
     "!!str [a]", "!!seq {a: b}", "!!map [a]", "!!int [1]", "!!null {}", "!!omap a", "!!seq a",
     "!!python/none ''", "!mine x"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["model: {}", "data: {{x: {}}}", "stages: [{}]"])
def test_tags_are_refused_by_line(tmp_path, value, place):
    path = tmp_path / "r.yaml"
    path.write_text("output: out\n" + place.format(value) + "\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2"):
        load_recipe(path)


def test_tags_that_say_what_is_there_are_fine():
    tree = parse("a: !!str 3\nb: !!map {c: !!seq [!!int 4]}\nd: 2024-01-01\n", "x").tree
    assert tree == {"a": "3", "b": {"c": [4]}, "d": "2024-01-01"}


# -- drafts -------------------------------------------------------------------

NAMES = ["2024", "true", "null", "1e5", "0x10", "1_0", "~", "no", "-", "---", "=", "<<", "é",
         ".inf", "0o7", "1.", "y", "2024-01-01", "a b", "#a", "a: b"]  # fmt: skip


def test_names_of_drafts_are_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [write_rows(Path(f"{name}.jsonl"), chat_rows(30)) for name in NAMES]
    text, target = draft_recipe(paths, "tiny:100k", Path("r.yaml"))
    recipe = load_recipe(target)
    assert len(recipe.data) == len(NAMES) and set(recipe.stages[0].data) == set(recipe.data)
    tree = parse(text, "r").tree
    assert list(tree["data"].values()) == [str(path.absolute()) for path in paths]
    assert "30 rows, shape" in text and "only the answers are targets" in text


@pytest.mark.parametrize(
    "model",
    ["./m #1", "a: b", "'x", "[x", "*x", "&x", "!x", "%x", "@x", "null", "true", "1e5", "- x",
     "? x", "| x", "> x", "`x", '"x', "{x", "x:", "#x", " x", "x ", "a\nb", "a\tb", "", "~", "\x85",
     "\u2028", "\ufeff", "\x1b", "😀", "x" * 300],
)  # fmt: skip
def test_any_model_text_comes_back(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "d.jsonl", chat_rows(3))
    _, target = draft_recipe([data], model, tmp_path / "r.yaml")
    assert parse(target.read_text(encoding="utf-8"), "r").tree["model"] == model


def test_a_relative_model_is_found_from_the_recipe(tmp_path, monkeypatch, saved_base):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_base, tmp_path / "m")
    data = write_rows(tmp_path / "d.jsonl", chat_rows(30))
    draft_recipe([data], "./m", Path("sub/r.yaml"))
    draft_recipe([data], "./m", Path("r.yaml"))
    for path, model in (("sub/r.yaml", str(tmp_path / "m")), ("r.yaml", "./m")):
        recipe = load_recipe(Path(path))
        assert recipe.model == model
    for model in ("tiny:100k", "owner/name"):
        _, target = draft_recipe([data], model, Path("sub", model.replace("/", "-") + ".yaml"))
        assert parse(target.read_text(), "r").tree["model"] == model


@pytest.mark.parametrize("stem", ["x #1: y", "a\nb", "null", "'", "&a", "- a", "a\x07", "{a}", "é"])
def test_any_name_of_a_draft(tmp_path, monkeypatch, stem):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "d.jsonl", chat_rows(30))
    text, target = draft_recipe([data], "tiny:100k", Path(f"{stem}.yaml"))
    assert parse(text, "r").tree["output"] == f"runs/{stem}"
    assert load_recipe(target).model == "tiny:100k"
    assert set(parse(text, "r").tree) == {
        "model", "template", "output", "adapter", "data", "stages"
    }  # fmt: skip


# -- findings -----------------------------------------------------------------


def test_rows_held_out_in_one_source_and_trained_in_another(tmp_path):
    data = write_rows(tmp_path / "d.jsonl", chat_rows(12))
    rows = read_source("a", [data]).examples
    found = findings({"a": rows, "b": rows[6:]}, None, {"a": [], "b": rows[:6]})
    mine = [one for one in found if one.kind == "held out here, trained on there"]
    assert [(one.source, one.count) for one in mine] == [("b", 6)]
    assert "trained on in source a" in mine[0].sentence and mine[0].examples[0].endswith(":1")
    apart = findings({"a": rows[6:], "b": rows[6:]}, None, {"a": rows[:6], "b": rows[:6]})
    assert not [one for one in apart if one.kind == mine[0].kind]
    assert json.dumps(mine[0].as_json())
