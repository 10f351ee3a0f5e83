"""Forgetting: how much worse a model got at the text that it knew before.

A model that lehr pretrained is asked about that text's held-out part. Of any other
model nobody has the training data, but the model can say it: texts that the base
itself writes are a sample of what it holds likely, so a rise of their bits per byte
is what was lost of it (for such texts the rise is KL(base || tuned) per byte).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from lehr.data.shapes import Example, Origin
from lehr.evaluation.heldout import HeldoutBits
from lehr.evaluation.suites import ItemScore, Measure
from lehr.generation.decode import generate
from lehr.streams import content_hash

TEXTS = 48
TEXT_TOKENS = 64


def own_texts(
    model: Any, encoder: Any, texts: int = TEXTS, tokens: int = TEXT_TOKENS, seed: int = 0
) -> list[Example]:
    """`texts` texts of at most `tokens` tokens that the model writes by itself at temperature 1.

    Empty ones are left out, repeated ones kept once; the same model gives the same texts.
    """
    documents = encoder.documents
    begin = documents.begin if documents.begin is not None else documents.end
    start = [min(encoder.stop_ids) if begin is None else begin]
    written = generate(
        model,
        [start] * texts,
        max_new_tokens=tokens,
        stop_ids=encoder.stop_ids | set(start),
        temperature=1.0,
        seed=seed,
    )
    found = dict.fromkeys(encoder.decode(one.ids).strip() for one in written)
    return [
        Example("text", Origin("own text", "written by the base", number), text=text)
        for number, text in enumerate(found, 1)
        if text
    ]


class OwnText:
    """Bits per byte of texts that the base wrote; they are written when first asked for.

    base_key  names the base: the same key, the same texts
    write     gives the texts (see `own_texts`), called once; where the base repeated itself
              there are fewer than TEXTS, and the last items have no score
    """

    measures: ClassVar[Mapping[str, Measure]] = {"bits_per_byte": Measure("bits/byte", "lower")}

    def __init__(
        self, base_key: str, write: Callable[[], Sequence[Example]], name: str = "forgetting"
    ) -> None:
        self.name, self.base_key, self._write = name, base_key, write

    @property
    def items(self) -> list[str]:
        return [f"own text {number}" for number in range(1, TEXTS + 1)]

    @property
    def data_hash(self) -> str:
        return content_hash(["own text", self.base_key, TEXTS, TEXT_TOKENS])

    @cached_property
    def texts(self) -> dict[str, Example]:
        """Item -> text."""
        return dict(zip(self.items, self._write(), strict=False))

    def prepare(self) -> None:
        """Have the texts written: the live model may become the base for it."""
        _ = self.texts

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]:
        """Score `items` under `model`; `prepare` comes first where `write` changes the model."""
        chosen = {item: self.texts[item] for item in items if item in self.texts}
        names = {example.content_key()[:20]: item for item, example in chosen.items()}
        bits = HeldoutBits(self.name, list(chosen.values()))
        rows = bits.score(model, bits.items, encoder)
        return [replace(row, id=names[row.id]) for row in rows if row.measure == "bits_per_byte"]
