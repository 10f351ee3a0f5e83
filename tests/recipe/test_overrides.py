"""`--set`: how a path is read, who wins, and what a bad override says."""

from __future__ import annotations

import pytest

from lehr.recipe.loading import loads, recipe_notices


def test_the_forms_of_a_stage_path(folder, full):
    for path in (
        "stages.1.sft.learning_rate",
        "stages.1.learning_rate",
        "stages.sft.learning_rate",
    ):
        recipe = loads(full, folder, [f"{path}=1e-3"])
        assert recipe.stages[1].learning_rate == 1e-3
    named = full.replace("{data: chats,", "{data: chats, name: tune,")
    assert loads(named, folder, ["stages.tune.clip=none"]).stages[1].clip is None


def test_values_are_yaml(folder, full):
    recipe = loads(
        full,
        folder,
        [
            "seed=1_000",
            "stages.0.data={law: 0.5, web: 0.5}",
            "export=[merged]",
            "stages.sft.schedule=linear",
            "stages.sft.schedule.warmup=7",
            "stages.preference.optimizer.betas=[0.8, 0.9]",
            "data.chats.holdout=0.2",
            "data.law=extra.jsonl",
            "adapter=none",
            "gates.protect.forgetting=0.1",
        ],
    )
    assert recipe.seed == 1000 and recipe.export == ["merged"] and recipe.adapter.kind == "none"
    assert recipe.stages[0].data == {"law": 0.5, "web": 0.5}
    assert recipe.stages[1].schedule.kind == "linear" and recipe.stages[1].schedule.warmup == 7
    assert recipe.stages[2].optimizer.betas == (0.8, 0.9)
    assert recipe.data["chats"].holdout == 0.2 and recipe.data["chats"].path == "chats.jsonl"
    assert recipe.data["law"].path == "extra.jsonl"
    assert recipe.gates.protect["forgetting"] == 0.1 and recipe.gates.protect["sycophancy"] == 0.05


@pytest.mark.parametrize(
    "override, expected",
    [
        ("adapter.rank=4", 4),
        ("lora_r=4", 4),
        ("adapter.lora_r=4", 4),
    ],
)
def test_short_forms_and_aliases_of_the_file_can_be_overridden(folder, override, expected):
    text = "model: m\nadapter: lora\nstages: [sft: {data: chats.jsonl}]"
    assert loads(text, folder, [override]).adapter.rank == expected


def test_an_override_wins_over_the_file_and_a_later_one_over_an_earlier(folder, full):
    recipe = loads(full, folder, ["seed=1", "seed=2"], name="r.yaml")
    assert recipe.seed == 2
    notices = recipe_notices(recipe)
    assert notices == [
        "--set seed=1: replaces 0 (r.yaml:4 seed)",
        "--set seed=2: replaces 1 (--set seed=1)",
    ]


def test_an_override_by_alias_wins_over_our_key_and_the_other_way(folder, sft):
    by_alias = loads(sft("epochs: 3"), folder, ["stages.0.num_train_epochs=1"])
    assert by_alias.stages[0].epochs == 1
    over_alias = loads(sft("num_train_epochs: 3"), folder, ["stages.0.epochs=1"])
    assert over_alias.stages[0].epochs == 1
    top = loads(sft("epochs: 3"), folder, ["num_train_epochs=1"])
    assert top.stages[0].epochs == 1


def test_epochs_and_updates_take_each_others_place(folder, sft):
    recipe = loads(sft("epochs: 3"), folder, ["stages.sft.max_updates=5"])
    assert recipe.stages[0].epochs is None and recipe.stages[0].max_updates == 5
    back = loads(sft("max_updates: 5"), folder, ["stages.sft.num_epochs=2"])
    assert back.stages[0].epochs == 2 and back.stages[0].max_updates is None
    assert any("instead of epochs in the file" in line for line in recipe_notices(recipe))


def test_null_gives_the_default_back(folder, full):
    assert loads(full, folder, ["stages.sft.learning_rate=null"]).stages[1].learning_rate == 2e-4
    assert loads(full, folder, ["stages.sft.learning_rate="]).stages[1].learning_rate == 2e-4


def test_a_key_that_the_file_does_not_have(folder, sft):
    recipe = loads(sft(), folder, ["stages.0.keep.replay.web=0.1", "adapter.targets=[q_proj]"])
    assert recipe.stages[0].keep.replay == {"web": 0.1}
    assert recipe.adapter.targets == ["q_proj"]


def test_data_of_another_file(folder, full):
    recipe = loads(full, folder, ["stages.sft.data=extra.jsonl", "gates=default"])
    assert recipe.stages[1].data == {"extra": 1.0}


BAD = {
    "stages.9.x=3": "--set stages.9.x: a stage that exists: 0 (pretrain), 1 (sft), 2 (preference)",
    "stages.ppo.x=3": "--set stages.ppo.x: a stage that exists",
    "stages.0.sft.epochs=3": "stages.0.pretrain; stage 0 is of that kind",
    "stages.0.pretrain=3": "a key of the stage, as in stages.0.epochs=1",
    "seed": "--set seed: a key path and a value",
    "=3": "a key path and a value",
    "a..b=3": "a key path and a value",
    "seed=[1": "--set seed=[1:1:3: readable YAML",
    "seed=-1": "--set seed=-1: a whole number, at least 0 (found -1)",
    "sede=1": "--set sede=1: a key of the top level; did you mean seed?",
    "nope.a=1": "--set nope.a=1: a key of the top level",
    "stages.sft.learning_rte=1": "--set stages.sft.learning_rte=1: a key of an sft stage",
    "stages.sft.learning_rate=fast": "--set stages.sft.learning_rate=fast: a number, at least 0",
    "stages.sft.beta=1": "beta belongs in preference stages only",
    "stages.sft.data=nope": "--set stages.sft.data=nope: a source",
    "data.law.path=gone.txt": "--set data.law.path=gone.txt: a file that exists",
    "data.law=gone.txt": "a file that exists",
    "export.5=merged": "--set export.5: an item of a list of 2, counted from 0",
    "gates.improve.sft=chats.bits": "--set gates.improve.sft=chats.bits: loss after the dot",
    "stages.sft.train_on_inputs=true": "--set stages.sft.train_on_inputs=true: false: lehr trains",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_names_itself(override, full, problems_of):
    (problem,) = problems_of(full, [override])
    assert BAD[override] in problem
    assert problem.startswith(f"--set {override.split('=')[0]}")


def test_bad_overrides_stand_beside_the_problems_of_the_file(full, problems_of):
    broken = full.replace("epochs: 1", "epochs: -1")
    problems = problems_of(broken, ["seed=x", "stages.9.x=1", "nothing"])
    assert [problem.split(":")[0] for problem in problems] == [
        "r.yaml",
        "--set stages.9.x",
        "--set nothing",
        "--set seed=x",
    ]


def test_two_stages_of_a_kind_need_a_number(problems_of):
    text = "model: m\ndata: {a: law.txt}\nstages: [sft: {data: a}, sft: {data: a}]"
    (problem,) = problems_of(text, ["stages.sft.epochs=1"])
    assert "one stage; sft means [0, 1]: use its number" in problem
