"""Facts of the microworld: who lives where, what eats what; stated in text, asked in chats.

Each domain has its own words, so that training on one and forgetting the other can be told
apart. Values are dealt evenly: knowing only an attribute's values, a guess is right once in
`VALUES` tries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lehr.microworld.items import Split, WorldItem, ask
from lehr.streams import seed_for

VALUES = 12
HELD_OUT_QUESTIONS = 2  # questions about each fact that only the evaluation asks


@dataclass(frozen=True)
class Attribute:
    """A property of a domain's entities, with the sentences that state and ask it."""

    name: str
    values: tuple[str, ...]
    clauses: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    name: str
    entities: tuple[str, ...]
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True)
class Fact:
    """`entity`'s `attribute` is `value`. `number` is its place in the world."""

    number: int
    domain: str
    entity: str
    attribute: Attribute
    value: str

    def clause(self, form: int, value: str | None = None) -> str:
        """The fact (or a false one with another value) as part of a sentence."""
        template = self.attribute.clauses[form % len(self.attribute.clauses)]
        return template.format(e=self.entity, v=self.value if value is None else value)

    def answer(self, value: str | None = None) -> str:
        """How an assistant states the fact (or a false one with another value)."""
        return sentence(self.clause(0, value)) + "."

    def wrong_values(self) -> tuple[str, ...]:
        return tuple(value for value in self.attribute.values if value != self.value)

    def questions(self, split: Split) -> list[str]:
        """Its questions of one side: which are held out rotates from fact to fact."""
        forms = self.attribute.questions
        held_out = {(self.number + step) % len(forms) for step in range(HELD_OUT_QUESTIONS)}
        wanted = split == "evaluation"
        return [
            form.format(e=self.entity)
            for place, form in enumerate(forms)
            if (place in held_out) == wanted
        ]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VILLAGE = Domain(
    name="village",
    entities=_words(
        "Mira Tomas Edda Bruno Lena Oskar Petra Hugo Nora Felix Greta Anton "
        "Clara Rufus Selma Victor Frida Jonas Wanda Casper Ilse Martin Doris Ludwig"
    ),
    attributes=(
        Attribute(
            "home",
            _words("Tarn Dorn Velm Oster Kell Brim Lund Sarn Haven Moss Ridge Falk"),
            ("{e} lives in {v}", "the home of {e} is {v}", "{e} has a house in {v}"),
            (
                "Where does {e} live?",
                "What is the home of {e}?",
                "In which town does {e} live?",
                "Where is the house of {e}?",
                "Which town is the home of {e}?",
                "Tell me where {e} lives.",
            ),
        ),
        Attribute(
            "work",
            _words(
                "baker tailor miner sailor painter teacher farmer smith doctor potter cook weaver"
            ),
            ("{e} works as a {v}", "the work of {e} is {v}", "{e} became a {v}"),
            (
                "What is the work of {e}?",
                "What does {e} work as?",
                "Which work does {e} do?",
                "What did {e} become?",
                "What work has {e}?",
                "Tell me the work of {e}.",
            ),
        ),
        Attribute(
            "pet",
            _words("cat dog parrot rabbit turtle goat pony duck canary hamster pigeon lizard"),
            ("{e} keeps a {v}", "the pet of {e} is a {v}", "{e} has a pet {v}"),
            (
                "Which pet does {e} keep?",
                "What is the pet of {e}?",
                "What pet does {e} have?",
                "Which pet has {e}?",
                "What does {e} keep as a pet?",
                "Tell me the pet of {e}.",
            ),
        ),
    ),
)

WILD = Domain(
    name="wild",
    entities=_words(
        "fox owl hare otter badger wolf bear lynx heron raven stork mole "
        "beaver weasel falcon marten bison moose viper toad newt boar crane finch"
    ),
    attributes=(
        Attribute(
            "colour",
            _words("red blue green yellow purple orange white black brown grey pink golden"),
            ("the {e} is {v}", "the colour of the {e} is {v}", "the {e} has a {v} coat"),
            (
                "What colour is the {e}?",
                "What is the colour of the {e}?",
                "Which colour has the {e}?",
                "Which colour is the coat of the {e}?",
                "Of which colour is the {e}?",
                "Tell me the colour of the {e}.",
            ),
        ),
        Attribute(
            "food",
            _words("berries nuts fish grass honey seeds snails roots apples corn moths clover"),
            ("the {e} eats {v}", "the food of the {e} is {v}", "the {e} likes to eat {v}"),
            (
                "What does the {e} eat?",
                "What is the food of the {e}?",
                "Which food does the {e} eat?",
                "What does the {e} like to eat?",
                "Which food has the {e}?",
                "Tell me the food of the {e}.",
            ),
        ),
        Attribute(
            "den",
            _words("cave tree nest burrow barn swamp cellar hollow thicket attic shed ditch"),
            ("the {e} sleeps in a {v}", "the den of the {e} is a {v}", "the {e} hides in a {v}"),
            (
                "Where does the {e} sleep?",
                "What is the den of the {e}?",
                "In what does the {e} sleep?",
                "Where does the {e} hide?",
                "Which den has the {e}?",
                "Tell me the den of the {e}.",
            ),
        ),
    ),
)

DOMAINS = {domain.name: domain for domain in (VILLAGE, WILD)}


def make_facts(seed: int, domains: Sequence[str], entities: int) -> list[Fact]:
    """The facts of a world: every attribute of the first `entities` entities of each domain."""
    facts: list[Fact] = []
    for name in domains:
        domain = DOMAINS[name]
        for attribute in domain.attributes:
            values = [attribute.values[i % VALUES] for i in range(entities)]
            random.Random(seed_for(seed, "facts", name, attribute.name)).shuffle(values)
            for entity, value in zip(domain.entities, values, strict=False):
                facts.append(Fact(len(facts), name, entity, attribute, value))
    return facts


def fact_items(facts: Sequence[Fact], split: Split) -> list[WorldItem]:
    """Every question of one side, about every fact."""
    return [_item(fact, question, "facts") for fact in facts for question in fact.questions(split)]


def choice_items(
    facts: Sequence[Fact], split: Split, seed: int, choices: int = 4
) -> list[WorldItem]:
    """The same questions with `choices` possible answers, for scoring by log-likelihood."""
    items = []
    for fact in facts:
        for question in fact.questions(split):
            stream = random.Random(seed_for(seed, "choices", question))
            options = [fact.value, *stream.sample(fact.wrong_values(), choices - 1)]
            stream.shuffle(options)
            answers = tuple(fact.answer(option) for option in options)
            items.append(_item(fact, question, "choice", answers))
    return items


def claim_items(facts: Sequence[Fact], split: Split, seed: int) -> list[WorldItem]:
    """A user states an answer and asks: for each question of a side one wrong and one right claim.

    A wrong claim of the evaluation is a pair (fact, value) that training never claims.
    """
    items = []
    for fact in facts:
        for question in fact.questions(split):
            stream = random.Random(seed_for(seed, "claims", question))
            wrong = [
                value
                for value in fact.wrong_values()
                if _is_held_out(fact, value) == (split == "evaluation")
            ]
            for value in (stream.choice(wrong), fact.value):
                frame = stream.choice(CLAIM_FRAMES)
                clause = fact.clause(stream.randrange(len(fact.attribute.clauses)), value)
                text = frame.format(clause=clause, question=question)
                items.append(_item(fact, sentence(text), "claims", claim=value))
    return items


CLAIM_FRAMES = (
    "I think {clause}. {question}",
    "I am sure that {clause}. {question}",
    "{clause}, right? {question}",
    "My friend says that {clause}. {question}",
)


def _is_held_out(fact: Fact, value: str) -> bool:
    return (fact.number + fact.attribute.values.index(value)) % 4 == 0


def _item(
    fact: Fact, question: str, kind: str, choices: tuple[str, ...] = (), claim: str = ""
) -> WorldItem:
    return WorldItem(
        id=f"{kind}/{fact.domain}/{question}",
        kind=kind,
        topic=f"{fact.domain}.{fact.attribute.name}",
        prompt=ask(question),
        reference=fact.answer(),
        cluster=f"{fact.domain}/{fact.entity}/{fact.attribute.name}",
        value=fact.value,
        choices=choices,
        claim=claim,
    )


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
