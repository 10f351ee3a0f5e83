"""The hash sees what a run depends on, and nothing else."""

from __future__ import annotations

import shutil

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import dump_recipe, loads, recipe_hash, stage_part

TEXT = """\
model: m
data:
  law: law.txt
  web: general.txt
  chats: chats.jsonl
stages:
  - pretrain: {data: law, keep: {replay: {web: 0.1}}}
  - sft: {data: chats}
date: 2030-01-01
"""


def hash_of(text, folder, overrides=()):
    return recipe_hash(loads(text, folder, overrides))


def test_comments_output_and_order_of_keys_do_not_count(folder):
    base = hash_of(TEXT, folder)
    assert hash_of("# a comment\n" + TEXT, folder) == base
    assert hash_of(TEXT, folder, ["output=elsewhere"]) == base
    assert hash_of("date: 2030-01-01\n" + TEXT.replace("date: 2030-01-01\n", ""), folder) == base
    assert hash_of(TEXT.replace("data: chats}", "data: chats, epochs: 1}"), folder) == base


def test_the_folder_and_file_names_do_not_count_but_the_content_does(folder, tmp_path_factory):
    base = hash_of(TEXT, folder)
    other = tmp_path_factory.mktemp("other") / "moved"
    shutil.copytree(folder, other)
    assert hash_of(TEXT, other) == base
    (other / "law.txt").rename(other / "law2.txt")
    assert hash_of(TEXT.replace("law.txt", "law2.txt"), other) == base
    (other / "law2.txt").write_text("another content")
    assert hash_of(TEXT.replace("law.txt", "law2.txt"), other) != base


@pytest.mark.parametrize(
    "override",
    [
        "model=n",
        "seed=1",
        "date=2030-01-02",
        "system=merge",
        "template=chatml",
        "adapter.rank=8",
        "stages.0.clip=2",
        "stages.1.epochs=2",
        "data.law.train_on=last",
        "data.law.holdout=3",
        "gates=none",
        "export=merged",
        "threads=2",
        "trust_remote_code=true",
    ],
)
def test_every_resolved_value_counts(folder, override):
    assert hash_of(TEXT, folder, [override]) != hash_of(TEXT, folder)


def test_a_template_counts_by_its_content(folder):
    (folder / "t.jinja").write_text("one")
    first = hash_of(TEXT, folder, ["template=t.jinja"])
    (folder / "t.jinja").write_text("two")
    assert hash_of(TEXT, folder, ["template=t.jinja"]) != first


def test_a_local_model_counts_by_its_content(folder):
    model = folder / "local"
    model.mkdir()
    (model / "weights").write_bytes(bytes(3_000_000))
    first = hash_of(TEXT, folder, ["model=./local"])
    model.rename(folder / "moved")
    assert hash_of(TEXT, folder, ["model=./moved"]) == first
    weights = bytearray(3_000_000)
    weights[-1] = 1
    (folder / "moved" / "weights").write_bytes(weights)
    assert hash_of(TEXT, folder, ["model=./moved"]) != first


def parts(folder, overrides=(), text=TEXT):
    recipe = loads(text, folder, overrides)
    return [stage_part(recipe, index) for index in range(len(recipe.stages))]


@pytest.mark.parametrize(
    "override, changed",
    [
        ("seed=1", [True, True]),
        ("model=n", [True, True]),
        ("template=chatml", [True, True]),
        ("date=2030-01-02", [True, True]),
        ("system=drop", [True, True]),
        ("adapter.rank=4", [True, True]),
        ("stages.1.epochs=2", [False, True]),
        ("stages.0.clip=2", [True, False]),
        ("stages.0.keep.replay.web=0.2", [True, False]),
        ("data.web.rows=3", [True, False]),
        ("data.chats.train_on=last", [False, True]),
        ("stages.0.promote=best", [True, False]),
        ("gates=none", [False, False]),
        ("export=merged", [False, False]),
        ("output=x", [False, False]),
        ("suites=kl", [False, False]),
        ("show=Hello?", [False, False]),
        ("threads=1", [False, False]),
        ("stages.0.name=first", [False, False]),
        ("stages.0.checkpoint_every=3", [False, False]),
        ("stages.0.evaluate_every=3", [False, False]),
    ],
)
def test_a_stage_part_holds_what_can_change_that_stage(folder, override, changed):
    before, after = parts(folder), parts(folder, [override])
    assert [one != other for one, other in zip(before, after, strict=True)] == changed


def test_when_a_stage_is_evaluated_counts_where_it_decides_what_is_promoted(folder):
    best = ["stages.0.promote=best", "stages.0.evaluate_every=3"]
    assert parts(folder, best) != parts(folder, [best[0], "stages.0.evaluate_every=4"])


def test_a_stage_part_holds_file_contents(folder):
    before = parts(folder)
    (folder / "chats.jsonl").write_text("edited")
    after = parts(folder)
    assert before[0] == after[0] and before[1] != after[1]


def test_the_tokenizer_of_a_tiny_model_comes_from_all_data(folder):
    before = parts(folder, ["model=tiny:1m"])
    (folder / "chats.jsonl").write_text("edited")
    assert parts(folder, ["model=tiny:1m"])[0] != before[0]


def test_a_file_that_vanished_is_a_recipe_error(folder):
    recipe = loads(TEXT, folder)
    (folder / "law.txt").unlink()
    with pytest.raises(RecipeError, match=r"law\.txt: expected a readable file"):
        recipe_hash(recipe)


def test_keys_that_came_later_count_only_where_they_are_used(folder):
    """A recipe that was hashed before they came has the same hash now."""
    base = hash_of(TEXT, folder)
    unused = [
        "stages.0.schedule.shape=linear",
        "stages.0.optimizer.momentum=none",
        "stages.0.optimizer.groups=[]",
        "stages.0.ema=none",
    ]
    assert hash_of(TEXT, folder, unused) == base
    used = [
        "stages.0.schedule={kind: wsd, shape: sqrt}",
        "stages.0.schedule.initial=0.5",
        "stages.0.optimizer={kind: sgd, momentum: 0.9}",
        "stages.0.optimizer.groups=[{pattern: '*'}]",
        "stages.0.ema=0.99",
    ]
    hashes = [hash_of(TEXT, folder, [override]) for override in used]
    assert len({base, *hashes}) == 6
    for override in used:
        recipe = loads(TEXT, folder, [override])
        assert recipe_hash(loads(dump_recipe(recipe), folder)) == recipe_hash(recipe)


def test_an_infinite_schedule_counts_in_updates_and_has_no_end(folder):
    schedule = loads(TEXT, folder, ["stages.0.schedule=infinite"]).stages[0].schedule
    assert (schedule.kind, schedule.warmup, schedule.decay) == ("infinite", 100, 0)
    given = loads(TEXT, folder, ["stages.0.schedule={kind: infinite, warmup: 7, decay: 0.1}"])
    assert (given.stages[0].schedule.warmup, given.stages[0].schedule.decay) == (7, 0.1)
