"""Every verb: its exit status, its JSON object on stdout, its prose elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import lora_recipe, stage, weights_recipe, write_recipe, write_rows

from lehr.cli.main import main


class Said:
    """What a command printed, and how it ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def value(self) -> Any:
        """The one JSON object on stdout, strictly."""

        def refuse(word: str) -> None:
            raise ValueError(f"stdout holds {word}")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def lehr(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command line in this process."""

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(one) for one in arguments])
        said = capsys.readouterr()
        return Said(int(left.value.code or 0), said.out, said.err)

    return call


# -- help ---------------------------------------------------------------------


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from lehr.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'scipy', 'pydantic'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for verb in ("run", "plan", "audit", "evaluate", "export", "chat", "explain", "fetch", "demo"):
        assert f" {verb} " in done.stdout


@pytest.mark.parametrize("verb", ["run", "plan", "audit", "evaluate", "export", "chat", "demo"])
def test_help_of_a_verb(lehr, verb):
    said = lehr(verb, "--help")
    assert said.status == 0 and f"Usage: lehr {verb}" in said.out


@pytest.mark.parametrize("verb", ["serve", "lab"])
def test_verbs_that_come_later_say_so(lehr, verb):
    said = lehr(verb, "something", "--speed")
    assert said.status == 2 and "not in this version of lehr" in said.err and not said.out
    said = lehr(verb, "something", "--json")
    assert said.value["error"]["kind"] == "recipe"


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["run"], ["run", "a.yaml", "--no-such"], ["evaluate", "m", "--items", "x"]],
)
def test_a_wrong_command_line_is_status_2(lehr, arguments):
    said = lehr(*arguments)
    assert said.status == 2 and said.err and "Traceback" not in said.err
    said = lehr(*arguments, "--json")
    assert said.status == 2 and said.value["error"]["problems"][0]["where"] == "command line"


# -- run ----------------------------------------------------------------------


def test_run_a_recipe_that_is_refused(lehr, work):
    path = work / "bad.yaml"
    data = "data: {a: {path: chats.jsonl, holdout: .inf}, b: {path: x.jsonl}}"
    path.write_text(f"model: ./base\n{data}\nstages: [sft: {{}}]\n")
    said = lehr("run", path)
    assert said.status == 2 and "problems:" in said.err and "bad.yaml:2" in said.err
    said = lehr("run", path, "--json")
    problems = said.value["error"]["problems"]
    assert said.status == 2 and said.value["error"]["kind"] == "recipe" and len(problems) == 3
    assert all(set(one) == {"where", "value", "expected"} for one in problems)
    assert any(one["value"] == "inf" for one in problems), "JSON has no infinity"
    assert lehr("run", work / "none.yaml").status == 2


def test_run_again_what_is_finished(lehr, finished):
    said = lehr("run", finished, "--json")
    assert said.status == 0
    assert said.value["verdict"] == "promoted" and len(said.value["stages"]) == 2
    assert "Promoted preference" in said.err, "prose belongs to stderr"
    said = lehr("run", finished, "--set", "gates.undetermined=keep", "--json")
    assert said.status == 3 and said.value["verdict"] == "undetermined"


def test_run_verify(lehr, finished):
    said = lehr("run", finished, "--verify", "--json")
    assert said.status == 0 and said.value["ok"] is True
    assert {"name", "ok", "found"} == set(said.value["checks"][0])
    weights = finished.parent / "out" / "model" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-4] + b"\x01\x02\x03\x04")
    said = lehr("run", finished, "--verify")
    assert said.status == 3 and "model/adapter_model.safetensors is not what" in said.out
    assert lehr("run", finished, "--verify", "--out", finished.parent / "no").status == 2


def test_run_without_room(lehr, work):
    path = write_recipe(work, lora_recipe(memory_limit=1e-4))
    said = lehr("run", path, "--json")
    assert said.status == 5 and said.value["error"]["kind"] == "resources"


def test_a_bug_is_status_1_and_asks_to_be_reported(lehr, work, monkeypatch):
    from lehr.pipeline import run as run_module

    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(run_module, "prepare", break_down)
    path = write_recipe(work, lora_recipe())
    said = lehr("run", path)
    assert said.status == 1 and "This is a bug in lehr" in said.err
    said = lehr("run", path, "--json")
    assert said.value["error"]["kind"] == "bug" and "the sky fell" in str(said.value)


def test_an_interrupt_anywhere_is_status_130(lehr, work, monkeypatch):
    from lehr.pipeline import run as run_module

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "prepare", interrupt)
    path = write_recipe(work, lora_recipe())
    assert lehr("run", path).status == 130
    said = lehr("run", path, "--json")
    assert said.status == 130 and said.value["error"]["kind"] == "interrupted"


# -- plan ---------------------------------------------------------------------


def test_plan_a_recipe(lehr, work):
    path = write_recipe(work, lora_recipe())
    said = lehr("plan", path, "--json")
    assert said.status == 0
    wanted = {"stages", "memory", "seconds", "masks", "schedule", "gates", "findings"}
    assert set(said.value) == wanted
    assert said.value["memory"]["peak"] > 0
    assert not list((work / "out").rglob("metrics.jsonl")), "nothing is trained"
    said = lehr("plan", path)
    assert said.status == 0 and "learning rate, 6 updates" in said.out
    assert "can pass" in said.out and "strategy:" in said.out
    assert lehr("plan", work / "none.yaml").status == 2


def test_plan_says_which_protection_random_weights_leave_unjudged(lehr, work):
    chats = {"chats": {"path": "chats.jsonl", "holdout": 10}}
    one = weights_recipe(data=chats, stages=[{"sft": stage("chats")}])
    said = lehr("plan", write_recipe(work, one))
    assert said.status == 0, said.err
    assert "protect forgetting: not judged" in said.out


def test_plan_numerics_shows_a_table(lehr, work):
    path = write_recipe(work, lora_recipe(gates="none"))
    said = lehr("plan", path, "--numerics")
    assert said.status == 0
    assert "fp16 would lose" in said.out and "lora_B" in said.out and "loss_scale:" in said.out
    found = json.loads(lehr("plan", path, "--numerics", "--json").out)["numerics"]
    assert len(found["tensors"]) == 28
    refused = lehr("plan", work / "chats.jsonl", "--model", "./base", "--numerics")
    assert refused.status == 2


def test_plan_with_checks(lehr, work):
    path = write_recipe(work, lora_recipe())
    said = lehr("plan", path, "--gradcheck", "--find-lr")
    assert said.status == 0 and "gradient agrees" in said.out
    assert "change of the loss in a range test" in said.out and "learning rate 1e-06 to" in said.out
    drawn = [line for line in said.out.split("\n") if " |" in line]
    assert len(drawn) == 12 and max(map(len, drawn)) <= 80
    assert "can pass" in said.out and "; \n" not in said.out
    said = lehr("plan", work / "chats.jsonl", "--model", "./base", "--find-lr", "--json")
    assert said.status == 2 and "--find-lr" in said.out and "a recipe" in said.out


def test_plan_data_drafts_a_recipe_that_plans(lehr, work, monkeypatch):
    monkeypatch.chdir(work)
    (work / "sub: #1").mkdir()
    write_rows(work / "sub: #1" / "chats.jsonl", [json.loads(line) for line in
               (work / "chats.jsonl").read_text().splitlines()])  # fmt: skip
    files = ["text.jsonl", "chats.jsonl", "pairs.jsonl", "sub: #1/chats.jsonl"]
    said = lehr("plan", *files, "--model", "./base", "--json")
    assert said.status == 0 and said.value["path"] == "recipe.yaml"
    assert "chats-2" in said.value["recipe"]
    assert lehr("plan", "recipe.yaml", "--json").status == 0
    said = lehr("plan", "chats.jsonl", "--model", "./base")
    assert said.status == 2 and "a new file for the recipe" in said.err
    assert lehr("plan", "chats.jsonl").status == 2
    assert lehr("plan", "none.jsonl", "--model", "./base", "--out", "b.yaml").status == 2


# -- audit --------------------------------------------------------------------


def test_audit(lehr, work, tmp_path):
    same = tmp_path / "other"
    same.mkdir()
    rows = [json.loads(line) for line in (work / "chats.jsonl").read_text().splitlines()]
    write_rows(same / "chats.jsonl", [*rows[:6], *rows[:3], {"messages": None}])
    clean = tmp_path / "clean.jsonl"
    said = lehr("audit", work / "chats.jsonl", same / "chats.jsonl", "--model", work / "base",
                "--clean", clean, "--json")  # fmt: skip
    found = said.value
    assert said.status == 0
    wanted = {"rows", "kept", "dropped", "tokens", "supervised_tokens", "findings"}
    assert wanted <= set(found)
    assert found["rows"] == 50 and found["kept"] == 49 and sum(found["dropped"].values()) == 1
    assert [one["name"] for one in found["sources"]] == ["chats", "chats-2"]
    assert all({"kind", "count", "examples"} <= set(one) for one in found["findings"])
    assert len(clean.read_text().splitlines()) == 40, "one row of each"
    said = lehr("audit", work / "chats.jsonl", "--model", work / "base")
    assert said.status == 0 and "every end token: yes" in said.out
    assert lehr("audit", work / "none.jsonl", "--json").value["error"]["problems"]
    write_rows(tmp_path / "bad.jsonl", [{"messages": None}])
    assert lehr("audit", tmp_path / "bad.jsonl").status == 2


# -- evaluate, export, chat ---------------------------------------------------


def test_evaluate(lehr, finished, work):
    run = finished.parent / "out"
    data = ("--data", finished.parent / "text.jsonl", "--data", finished.parent / "chats.jsonl")
    few = ("--suites", "forgetting,text,chats", "--items", 12)
    said = lehr("evaluate", run, *data, *few, "--json")
    assert said.status == 0
    assert set(said.value) == {"suites", "flips", "gates", "verdict", "notes"}
    assert said.value["verdict"] == "measured"
    for measures in said.value["suites"].values():
        for entry in measures.values():
            assert {"value", "low", "high", "n", "unit"} == set(entry)
    base = finished.parent / "base"
    said = lehr("evaluate", run, "--against", base, *data, *few, "--json")
    assert said.status in (0, 3)
    assert [gate["name"] for gate in said.value["gates"]] == ["forgetting"]
    assert (said.status == 0) == (said.value["verdict"] == "passed")
    said = lehr("evaluate", run, "--suites", "no_such")
    assert said.status == 2 and "one of" in said.err
    assert lehr("evaluate", work / "nowhere").status == 2
    assert "bits/byte" in lehr("evaluate", run, *data, *few).out


def test_evaluate_does_not_compare_unlike_templates(lehr, finished):
    base = finished.parent / "base"
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    merged, chats = finished.parent / "out/exports/merged", finished.parent / "chats.jsonl"
    said = lehr("evaluate", merged, "--against", base, "--data", chats, "--suites", "chats")
    assert said.status == 2 and "the same tokenizer and chat template" in said.err


def test_export(lehr, finished):
    run = finished.parent / "out"
    said = lehr("export", run, "--to", "adapter,merged", "--json")
    assert said.status == 0 and said.value["gap"] == ""
    assert [one["kind"] for one in said.value["exports"]] == ["adapter", "merged"]
    said = lehr("export", run, "--to", "gguf", "--json")
    assert said.status == 2 and "GGUF" in str(said.value["error"]["problems"])
    assert lehr("export", finished.parent / "base").status == 2


def test_export_that_is_not_what_was_trained(lehr, finished, monkeypatch):
    from lehr.pipeline import exporting

    read_plain = exporting.read_plain

    def spoilt(path: Path, kind: str, *how: Any) -> Any:
        network, tokenizer = read_plain(path, kind, *how)
        network.get_input_embeddings().weight.data.mul_(1.1)
        return network, tokenizer

    monkeypatch.setattr(exporting, "read_plain", spoilt)
    (finished.parent / "out" / "exports" / "merged" / "lehr-export.json").unlink()
    said = lehr("export", finished.parent / "out")
    assert said.status == 3
    assert "log-probabilities differ" in " ".join(said.err.split())


def test_chat(lehr, finished):
    run, base = finished.parent / "out", finished.parent / "base"
    short = ("--prompt", "Which colour has door 3?", "--tokens", 4)
    said = lehr("chat", run, *short)
    assert said.status == 0 and said.out.strip()
    said = lehr("chat", run, "--against", base, *short, "--json")
    assert [one["model"] for one in said.value["answers"]] == [str(base), str(run)]
    assert lehr("chat", run, "--json").status == 2
    assert lehr("chat", finished.parent / "nowhere", *short).status == 2


def test_chat_reads_lines_until_they_end(lehr, finished, monkeypatch):
    lines = iter(["Which colour has door 3?", "", "And boat 1?"])

    def typed(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    said = lehr("chat", finished.parent / "out", "--tokens", 3)
    assert said.status == 0 and "a new conversation" in said.out


# -- explain, fetch, demo -----------------------------------------------------


def test_explain(lehr):
    said = lehr("explain")
    assert said.status == 0 and "evaluation" in said.out
    names = [one["name"] for one in lehr("explain", "--json").value["topics"]]
    assert {"evaluation", "preference", "sft"} <= set(names)
    assert lehr("explain", "packing", "--json").value["topic"] == "packing"
    assert "#" in lehr("explain", "packing").out
    said = lehr("explain", "pakcing")
    assert said.status == 2 and "packing" in said.err


def test_fetch(lehr):
    assert lehr("fetch").out.split() == ["smollm2-135m-instruct"]
    assert lehr("fetch", "--json").value == {"models": ["smollm2-135m-instruct"]}
    said = lehr("fetch", "smolm2-135m-instruct")
    assert said.status == 2 and "smollm2-135m-instruct" in said.err


def test_demo_is_a_recipe_that_loads():
    from importlib import resources

    from lehr.recipe.loading import load_recipe

    with resources.as_file(resources.files("lehr.cli") / "demo.yaml") as path:
        recipe = load_recipe(path)
    assert len(recipe.stages) == 4 and recipe.gates.on_refusal == "continue"
