"""Every kind of mistake: where it is, what stood there, what was expected; all at once."""

from __future__ import annotations

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import loads


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


CASES = {
    # numbers
    "learning_rate: -1e-4": "learning_rate: a number, at least 0 (found -0.0001)",
    "learning_rate: .inf": "learning_rate: a finite number, at least 0 (found inf)",
    "learning_rate: .nan": "learning_rate: a finite number, at least 0 (found nan)",
    'learning_rate: "false"': "learning_rate: a number, at least 0 (found 'false')",
    "learning_rate: false": "learning_rate: a number, at least 0 (found False)",
    "learning_rate: true": "(found True)",
    "learning_rate: 1e-5x": "(found '1e-5x')",
    "learning_rate: [1]": "(found [1])",
    "learning_rate: ": "learning_rate: a number, at least 0 (nothing is given)",
    "batch_size: 1.5": "batch_size: a whole number, at least 1 (found 1.5)",
    "batch_size: 0": "a whole number, at least 1",
    "batch_size: true": "a whole number, at least 1 (found True)",
    "max_updates: 1e400": "max_updates: a whole number, at least 1 or none (found inf)",
    "epochs: 0": "epochs: a number above 0 or none",
    "max_length: 1": "max_length: a whole number, at least 2",
    "micro_batch: some": "micro_batch: auto or a whole number, at least 1 (found 'some')",
    "schedule: {warmup: 1.5}": "a share below 1, or a whole number of updates (found 1.5)",
    "schedule: {final: 2}": "schedule.final: a number from 0 to 1 (found 2)",
    "optimizer: {betas: [0.9]}": "optimizer.betas",
    "optimizer: {betas: [0.9, 1.0]}": "betas.1: a number, at least 0 and below 1 (found 1.0)",
    # words
    "packing: maybe": "packing: true or false (found 'maybe')",
    "packing: 2": "packing: true or false (found 2)",
    "schedule: cosin": "wsd, constant, infinite; did you mean cosine? (found 'cosin')",
    "name: true": "name: a name of letters, digits, _ and - or none; quote it to make it text",
    "name: a/b": "name: a name of letters, digits, _ and -",
    # later
    "precision: fp12": "one of auto, fp32, bf16, fp16, fp8, pure_bf16; did you mean fp32? "
    "(found 'fp12')",
    "teacher: m": "stages.0.sft.teacher: no teacher: it is not in this version",
    "guard: true": "rewind, skip, stop or off, or a mapping with policy (found True)",
    "keep: {kl: 0.1}": "keep.kl: no kl: it is not in this version; replay is there",
    "adapter: {kind: dora}": "one of lora, qlora, none",
    "optimizer: lion": "lion is not in this version",
    # recomputation
    "recompute: {budget: 1}": "{budget: share} with a share above 0 and below 1",
    "recompute: {budget: 0}": "recompute: none, full, selective, auto, or {budget: share}",
    "recompute: {budgt: 0.5}": "or {budget: share} with a share above 0",
    "recompute: {budget: 0.5, x: 1}": "or {budget: share} with a share above 0",
    "recompute: selectiv": "did you mean selective? (found 'selectiv')",
    "recompute: 0.5": "recompute: one of none, full, selective, auto or a mapping with the keys",
    # optimizers, schedules, averages
    "ema: 1": "ema.decay: a number above 0 and below 1 (found 1",
    "ema: {decay: 0}": "ema.decay: a number above 0 and below 1 (found 0",
    "ema: {decy: 0.9}": "did you mean decay?",
    "ema: high": "ema",
    "max_updates: 5, ema: {start_after: 5}": "ema.start_after: fewer than max_updates (5)",
    "optimizer: {momentum: 0.9}": "optimizer.momentum: sgd or muon with it, not adamw (found 0.9)",
    "optimizer: {kind: sgd, momentum: 1}": "optimizer.momentum: a number, at least 0 and below 1",
    "optimizer: {kind: sgd, nesterov: true}": "optimizer.nesterov: a momentum above 0 with it",
    "optimizer: {kind: adam, weight_decay: 0.1}": "0: adam has no decay; say adamw",
    "optimizer: {match_rms: false}": "optimizer.match_rms: muon with it, not adamw",
    "optimizer: {kind: sgd, beta2_half_life_tokens: 9}": "beta2_half_life_tokens: adamw or",
    "optimizer: {beta2_half_life_tokens: 0}": "beta2_half_life_tokens: a number above 0",
    "optimizer: {groups: [{weight_decay: 0}]}": "groups.0.pattern",
    "optimizer: {groups: [{pattern: a, rate: 2}]}": "groups.0",
    "optimizer: {watch_every: 0}": "watch_every: a whole number, at least 1",
    "schedule: {kind: wsd, shape: cubic}": "schedule.shape: one of linear, sqrt",
    "schedule: {initial: 2}": "schedule.initial: a number from 0 to 1",
    "schedule: {kind: infinite, warmup: 0.1}": "a number of updates, or 0: an infinite run has no",
    # keys
    "learning_rte: 1e-4": "a key of an sft stage; did you mean learning_rate? (found 0.0001)",
    "learning-rate: 1e-4": "stages.0.sft.learning-rate: a known key; did you mean learning_rate?",
    "Epochs: 1": "did you mean epochs?",
    "num-epochs: 1": "num_epochs means epochs",
    "beta: 0.1": "a key of an sft stage; beta belongs in preference stages only",
    "warmup: 0.1": "warmup belongs in schedule (of a stage)",
    "rank: 8": "rank belongs in adapter",
    "seed: 3": "seed belongs in the top level",
    "holdout: 3": "holdout belongs in a source in data",
    "schedule: {learning_rate: 1}": "learning_rate belongs in a stage",
    "schedule: {lora_r: 1}": "lora_r means adapter.rank",
    "zzzz: 1": "a key of an sft stage: name, data, max_length",
    # between keys
    "epochs: 1, max_updates: 2": "epochs or max_updates, not both (epochs is 1)",
    "overflow: split": "only plain text (a pretrain stage) can be split",
    "pack_length: 512": "at least max_length (1024)",
    "keep: {replay: {chats: 0.1}}": "chats has its share there",
    "keep: {replay: {web: 1.5}}": "keep.replay.web: a number above 0 and below 1 (found 1.5)",
    "keep: {replay: {wbe: 0.1}}": "a source (chats, web) or a path; did you mean web?",
    "keep: {replay: web}": "shares of the stage's tokens, as in {web: 0.05}",
    "fold_parent: true": "there is no parent adapter to fold",
    "max_updates: 5, schedule: {warmup: 10}": "warmup: at most max_updates (5) (found 10",
    "schedule: {kind: wsd, warmup: 0.6, decay: 0.6}": "warmup + decay of at most 1",
}


@pytest.mark.parametrize("keys", CASES)
def test_a_stage_key_that_is_wrong(keys, sft, problems_of):
    problem = only(problems_of(sft(keys)))
    assert CASES[keys] in problem
    assert problem.startswith("r.yaml:7 stages.0.sft.")


SOURCES = {
    "missing.jsonl": "r.yaml:4 data.chats.path: a file that exists",
    "chat.jsonl": "did you mean chats.jsonl?",
    "org/rows": "hub data sets are not in this version",
    "{path: chats.jsonl, microworld: chats}": "builtin (path and microworld given)",
    "{rows: 5}": "one of path, microworld, builtin (none given)",
    "{path: [chats.jsonl, gone.jsonl]}": "(found 'gone.jsonl')",
    "{path: []}": "at least one file",
    "{path: chats.jsonl, holdout: 1.5}": "a whole number, at least 0 or a number, at least 0",
    "{path: chats.jsonl, holdout: -1}": "data.chats.holdout",
    "{path: chats.jsonl, train_on: user}": "one of assistant, last, completion",
    "{path: chats.jsonl, options: {a: 1}}": "no options: it belongs to a microworld source",
    "{microworld: chat}": "did you mean chats?",
    "{path: .}": "a file; this is a folder",
    "5": "a mapping with the keys path, builtin, microworld",
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_is_wrong(source, sft, problems_of):
    assert SOURCES[source] in only(problems_of(sft(source=source)))


TOP = {
    "template: chatmll": "auto, chatml or a template file; did you mean chatml?",
    "template: none.jinja": "a file that exists",
    "system: kep": "did you mean keep?",
    "seed: -1": "r.yaml:2 seed: a whole number, at least 0 (found -1)",
    "threads: 0": "threads: auto or a whole number, at least 1",
    "memory_limit: -3": "memory_limit: auto or a number above 0",
    "date: yesterday": "auto, or a date written YYYY-MM-DD",
    "date: 2024-1-2": "auto, or a date written YYYY-MM-DD",
    "export: gguf": "gguf is not in this version",
    "export: [adapter, adapter]": "each word once",
    "suites: [skils]": "did you mean skills?",
    "adapter: {rank: 0}": "adapter.rank: a whole number, at least 1",
    "adapter: {ranks: 8}": "a key of adapter; did you mean rank?",
    "adapter: {targets: 3}": "all-linear or a list of text (found 3)",
    "adapter: [lora]": "adapter: a mapping with the keys kind, rank",
    "adapter: {kind: none}\nexport: adapter": "merged: no stage trains an adapter",
    "folder: x": "r.yaml:2 folder: a key of the top level",
    "stage: sft": "stage: a key of the top level; did you mean stages?",
    "learning_rate: 1e-4": "a key of the top level; learning_rate belongs in a stage",
    "gates: no": "default, none, or a mapping with improve and protect",
    "gates: {improve: {sft: chats.accuracy}}": "loss after the dot: what can improve in sft",
    "gates: {improve: {sft: chats}}": "source.measure, as in chats.loss",
    "gates: {improve: {sft: chat.loss}}": "a source of data (chats, web); did you mean chats?",
    "gates: {improve: {stf: chats.loss}}": "did you mean sft?",
    "gates: {protect: {forgeting: 0.1}}": "did you mean forgetting?",
    "gates: {protect: {forgetting: -0.1}}": "forgetting: a number above 0 or none (found -0.1)",
    "gates: {on_refusal: go}": "one of stop, continue",
    "gates: {undetermind: keep}": "did you mean undetermined?",
}


@pytest.mark.parametrize("top", TOP)
def test_a_top_key_that_is_wrong(top, sft, problems_of):
    assert TOP[top] in only(problems_of(sft(top=top)))


MODELS = {
    "tiny:big": "tiny:SIZE, as in tiny:300k",
    "tiny:1m+norm": "or tiny:1m+qk_norm",
    "./nowhere": "a file that exists",
    "model.gguf": "a file that exists",
    "two words": "a name known to lehr fetch",
    "7": "model: text; quote it to make it text",
    "": "model: text (nothing is given)",
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_is_wrong(model, problems_of):
    text = f"model: {model}\ndata: {{a: law.txt}}\nstages: [pretrain: {{data: a}}]"
    assert MODELS[model] in only(problems_of(text))


STAGES = {
    "[grpo: {data: a}]": "grpo is not in this version",
    "[pretrian: {data: a}]": "did you mean pretrain?",
    "[{pretrain: {data: a}, sft: {data: a}}]": "are two stages: begin each with a dash",
    "[{pretrain: , data: a}]": "indent the keys of a stage under its kind",
    "[pretrain: a.txt]": "the keys of a pretrain stage",
    "[7]": "a stage: its kind and its keys",
    "[]": "at least one stage",
    "7": "a list of stages",
    "[pretrain: {}]": "stages.0.pretrain.data: data, which is missing: a source, a path",
    "[pretrain: {data: b}]": "a source (a) or a path",
    "[pretrain: {data: []}]": "at least one source",
    "[pretrain: {data: 3}]": "a source, a path, a list of them, or shares",
    "[pretrain: {data: [3]}]": "the name of a source, or a path (found 3)",
    "[pretrain: {data: [a, a]}]": "each source once",
    "[pretrain: {data: {a: 0}}]": "a number above 0 and at most 1 (found 0)",
    "[pretrain: {data: {a: -1}}]": "a number above 0 and at most 1 (found -1)",
    "[pretrain: {data: {a: 0.5}}]": "shares that sum to 1; these sum to 0.5 (say {a: 1})",
    "[pretrain: {data: x/y.txt}]": "a file that exists",
    "[preference: {data: a, loss: simpo}]": "simpo is not in this version",
    "[preference: {data: a, label_smoothing: 0.5}]": "at least 0 and below 0.5",
    "[pretrain: {data: a}, sft: {data: a, adapter: {rank: 4}}]": "or fold_parent: true",
}


@pytest.mark.parametrize("stages", STAGES)
def test_stages_that_are_wrong(stages, problems_of):
    text = f"model: m\ndata: {{a: law.txt}}\nstages: {stages}\ngates: none"
    problem = only(problems_of(text))
    assert STAGES[stages] in problem and problem.startswith("r.yaml:3 stages")


def test_everything_missing_is_said(problems_of):
    problems = problems_of("seed: 1")
    assert any("model, which is missing" in problem for problem in problems)
    assert any("stages: a list of stages" in problem for problem in problems)


def test_no_held_out_rows_for_the_default_gate(problems_of):
    text = "model: m\ndata: {a: {path: law.txt, holdout: 0}}\nstages: [pretrain: {data: a}]"
    assert "say gates: none to train without" in only(problems_of(text))
    assert problems_of(text + "\ngates: none") == []
    gated = text + "\ngates: {improve: {pretrain: a.loss}}"
    assert "a has holdout: 0" in only(problems_of(gated))


def test_all_problems_at_once_in_the_order_of_the_file(problems_of):
    text = """\
modle: m
data:
  chats: gone.jsonl
  web: {path: general.txt, hold_out: 3}
stages:
  - sft: {data: chat, epochs: -1, learning_rte: 1}
  - preference: {data: web, beta: 0}
"""
    problems = problems_of(text)
    lines = [problem.split(" ")[0] for problem in problems]
    assert lines == [f"r.yaml:{n}" for n in (1, 3, 4, 6, 6, 6, 7)] + ["r.yaml"]
    assert "model, which is missing" in problems[-1]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "model: m\ndata: {a: {path: gone.jsonl, holdout: many}}\nstages: [sft: {data: a}]",
            [2, 2],
        ),
        ("model: ./gone\nseed: x\ndata: {}\nstages: [sft: {data: chats.jsonl}]", [1, 2]),
        ("model: m\nstages:\n- pretrain:\n    data: {law.txt: 0.5}\n    epochs: x", [4, 5]),
    ],
    ids=["source", "header", "stage"],
)
def test_a_wrong_key_hides_no_other_problem_of_its_section(problems_of, text, lines):
    said = [problem.split(" ")[0] for problem in problems_of(text)]
    assert said == [f"r.yaml:{line}" for line in lines]


def test_one_mistake_is_one_problem(problems_of, full):
    broken = full.replace("chats.jsonl, holdout: 200", "chats.jsonl, holdout: many")
    only(problems_of(broken))
    only(problems_of(full.replace("{law: 0.75, web: 0.25}", "{law: 0.75, web: x}")))


def test_problems_as_json(folder):
    with pytest.raises(RecipeError) as caught:
        loads("model: m\nstages: [sft: {data: chats.jsonl, epochs: -1}]", folder, name="r.yaml")
    assert caught.value.exit_status == 2
    assert caught.value.as_json()["error"]["problems"] == [
        {
            "where": "r.yaml:2 stages.0.sft.epochs",
            "value": -1,
            "expected": "a number above 0 or none",
        }
    ]


def test_long_values_are_cut(sft, problems_of):
    assert len(only(problems_of(sft(f"precision: {'x' * 5000}")))) < 300


def test_paths_that_exist_from_the_current_folder_are_explained(folder, monkeypatch, problems_of):
    other = folder / "elsewhere"
    other.mkdir()
    (other / "here.jsonl").write_text("{}")
    monkeypatch.chdir(other)
    problem = only(problems_of("model: m\nstages: [sft: {data: here.jsonl}]"))
    assert "paths start at the recipe" in problem
