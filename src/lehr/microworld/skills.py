"""Skills of the microworld: small tasks with one right answer that is computed, not looked up.

The words, lists and pairs that the evaluation asks about are never asked about in training,
so the score says that the skill was learned and not its examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from lehr.microworld.items import Split, WorldItem, ask
from lehr.streams import seed_for

OBJECTS = [
    "lamp",
    "drum",
    "leaf",
    "coin",
    "shell",
    "rope",
    "wheel",
    "candle",
    "ladder",
    "basket",
    "button",
    "feather",
    "mirror",
    "needle",
    "pillow",
    "ribbon",
    "bottle",
    "carpet",
]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"


def _spell(stream: random.Random) -> tuple[str, str]:
    # Written in syllables, so that any tokenizer sees parts that it knows from other words.
    syllables = [stream.choice(CONSONANTS) + stream.choice(VOWELS) for _ in range(2)]
    return "-".join(syllables), " ".join("".join(syllables))


def _first(stream: random.Random) -> tuple[str, str]:
    words = stream.sample(OBJECTS, 3)
    return " ".join(words), words[0]


def _last(stream: random.Random) -> tuple[str, str]:
    words = stream.sample(OBJECTS, 3)
    return " ".join(words), words[-1]


def _copy(stream: random.Random) -> tuple[str, str]:
    words = stream.sample(OBJECTS, 3)
    return " ".join(words), " ".join(words)


def _count(stream: random.Random) -> tuple[str, str]:
    times = stream.randrange(1, 7)
    return " ".join([stream.choice(OBJECTS)] * times), NUMBERS[times]


def _larger(stream: random.Random) -> tuple[str, str]:
    one, other = stream.sample(range(30), 2)
    return f"{one} or {other}", str(max(one, other))


MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "spell": _spell,
    "first": _first,
    "last": _last,
    "copy": _copy,
    "count": _count,
    "larger": _larger,
}
# What a world has unless it is asked for more; copy and larger need longer training.
DEFAULT_SKILLS = ("spell", "first", "last", "count")
QUESTIONS = {
    "spell": ("Spell {x}.", "How is {x} spelled?"),
    "first": ("Which word is first: {x}?", "Tell me the first word of {x}."),
    "last": ("Which word is last: {x}?", "Tell me the last word of {x}."),
    "copy": ("He said {x}. What did she say?", "She says the same as he: {x}."),
    "count": ("How many words: {x}?", "Count these: {x}."),
    "larger": ("Which is larger, {x}?", "Tell me the larger number, {x}?"),
}
ANSWERS = {
    "spell": "{y}",
    "first": "The first word is {y}.",
    "last": "The last word is {y}.",
    "copy": "She said {y}.",
    "count": "There are {y}.",
    "larger": "The larger is {y}.",
}
STATEMENTS = {
    "spell": "we spell {x} as {y}.",
    "first": "The first word of {x} is {y}.",
    "last": "The last word of {x} is {y}.",
    "copy": "he said {x} and she said {y}.",
    "count": "There are {y} in {x}.",
    "larger": "The larger of {x} is {y}.",
}


def side(seed: int, skill: str, task: str) -> Split:
    """Which split a task belongs to: one in five is held out, by its content alone."""
    return "evaluation" if seed_for(seed, skill, task) % 5 == 0 else "train"


def draw_task(stream: random.Random, seed: int, skill: str, split: Split) -> tuple[str, str]:
    """A task of one side and its answer."""
    while True:
        task, answer = MAKERS[skill](stream)
        if side(seed, skill, task) == split:
            return task, answer


def draw_item(stream: random.Random, seed: int, skill: str, split: Split) -> WorldItem:
    """A question of one side."""
    task, answer = draw_task(stream, seed, skill, split)
    question = stream.choice(QUESTIONS[skill]).format(x=task)
    return WorldItem(
        id=f"skills/{skill}/{question}",
        kind="skills",
        topic=skill,
        prompt=ask(question),
        reference=ANSWERS[skill].format(y=answer),
        cluster=f"{skill}/{task}",
        value=answer,
    )


def skill_items(seed: int, split: Split, skills: tuple[str, ...], each: int) -> list[WorldItem]:
    """Up to `each` distinct items of every skill (fewer where a skill has no more tasks)."""
    items: dict[str, WorldItem] = {}
    for skill in skills:
        stream = random.Random(seed_for(seed, "skill items", skill, split))
        before = len(items)
        for _ in range(20 * each):
            if len(items) - before == each:
                break
            item = draw_item(stream, seed, skill, split)
            items.setdefault(item.id, item)
    return list(items.values())
