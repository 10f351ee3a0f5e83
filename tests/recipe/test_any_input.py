"""Whatever a recipe holds, it is read or refused with a RecipeError: never a traceback."""

from __future__ import annotations

import copy
import random

import pytest
from ruamel.yaml import YAML

from lehr.errors import RecipeError
from lehr.recipe.loading import dump_recipe, loads, recipe_from, recipe_hash

VALUES = [
    *(None, True, False, 0, -1, 1, 3, 1.5, 1e300, float("inf"), float("nan"), 10**30),
    *("", " ", "none", "default", "auto", "a.b", "law", "lora", "chats.loss", "\x00", "ß" * 300),
    *([], {}, [[]], [{}], {"a": {}}, {"": ""}, {"kind": "sft"}, ["law", None], {"law": None}),
    *([1, 2], {"path": None}, {"path": [None]}, {"path": "\x00"}, [{"sft": None}], {"sft": []}),
]
KEYS = [
    *("model", "stages", "data", "gates", "adapter", "kind", "name", "replay", "keep", "improve"),
    *(
        "protect",
        "num_train_epochs",
        "dataset",
        "datasets",
        "val_set_size",
        "stage",
        "rl",
        "lora_r",
    ),
    *("micro_batch_size", "gradient_accumulation_steps", "adam_beta1", "schedule", "optimizer"),
    *(
        "loss_type",
        "warmup_steps",
        "path",
        "microworld",
        "options",
        "<<",
        "",
        "é",
        "beta",
        "report_to",
    ),
]


def places(node, path=()):
    """Every path of a tree."""
    yield path
    inner = node if isinstance(node, list) else ()
    for key, value in node.items() if isinstance(node, dict) else enumerate(inner):
        yield from places(value, (*path, key))


def mutate(tree, stream):
    """One to three changes: a value replaced, a key added, a key taken away."""
    for _ in range(stream.randint(1, 3)):
        path = stream.choice(list(places(tree)))
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        node = holder[path[-1]] if path else tree
        choice = stream.random()
        if choice < 0.5 and path:
            holder[path[-1]] = copy.deepcopy(stream.choice(VALUES))
        elif choice < 0.85 and isinstance(node, dict):
            node[stream.choice(KEYS)] = copy.deepcopy(stream.choice(VALUES))
        elif path and isinstance(holder, dict):
            del holder[path[-1]]
    return tree


@pytest.mark.parametrize("seed", range(8))
def test_mutated_recipes(folder, full, seed):
    stream = random.Random(seed)
    base = YAML(typ="safe", pure=True).load(full)
    read = 0
    for _ in range(60):
        tree = mutate(copy.deepcopy(base), stream)
        overrides = [f"{stream.choice(KEYS)}=1"] if stream.random() < 0.1 else []
        try:
            recipe = recipe_from(tree, folder, overrides)
        except RecipeError as error:
            assert error.problems
            assert all(problem.where and problem.expected for problem in error.problems)
        else:
            read += 1
            assert recipe_hash(loads(dump_recipe(recipe), folder)) == recipe_hash(recipe)
    assert read > 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_text(folder, full, seed):
    stream = random.Random(seed)
    for _ in range(25):
        text = list(full)
        for _ in range(stream.randint(1, 4)):
            at = stream.randrange(len(text))
            text[at : at + stream.randint(0, 3)] = stream.choice("{}[]:,&*!%@`'\"#|>-?\n\t \x07x")
        try:
            loads("".join(text), folder)
        except RecipeError as error:
            assert error.problems
