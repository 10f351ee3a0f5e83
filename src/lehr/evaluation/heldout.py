"""Held-out texts and pairs: loss, bits per byte, and which of two answers is likelier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lehr.data.encoded_rows import Encoding
from lehr.data.shapes import Encoded, Example, Message
from lehr.evaluation.likelihood import SequenceScore, sequence_scores
from lehr.evaluation.suites import ItemScore, Measure
from lehr.streams import content_hash

SHOWN_CHARACTERS = 2000
TIE_NATS = 1e-4  # closer than scores are reproducible: neither side is likelier


class _Examples:
    """Examples under stable ids, encoded once for each encoder."""

    measures: ClassVar[Mapping[str, Measure]]

    def __init__(
        self,
        name: str,
        examples: Sequence[Example],
        *,
        train_on: str = "assistant",
        max_length: int = 1024,
        overflow: str = "truncate",
    ) -> None:
        self.name = name
        self.train_on, self.max_length, self.overflow = train_on, max_length, overflow
        # The same content counts once: a repeated row would be a repeated vote.
        by_key = {example.content_key()[:20]: example for example in examples}
        # In the order of their hashes: the first n are a fair sample of all.
        self._examples = dict(sorted(by_key.items()))
        self._encodings: tuple[str, dict[str, Encoding]] = ("", {})

    @property
    def items(self) -> list[str]:
        return list(self._examples)

    @property
    def data_hash(self) -> str:
        return content_hash([sorted(self._examples), self.train_on, self.max_length, self.overflow])

    def encodings(self, encoder: Any) -> dict[str, Encoding]:
        """Item id -> its sequences, or why it has none."""
        if self._encodings[0] != encoder.fingerprint:
            made = {
                name: encoder.encode(
                    example,
                    train_on=self.train_on,
                    max_length=self.max_length,
                    overflow=self.overflow,
                )
                for name, example in self._examples.items()
            }
            self._encodings = (encoder.fingerprint, made)
        return self._encodings[1]

    def encoded(self, encoder: Any) -> dict[str, list[Encoded]]:
        """Item id -> its sequences; rows that the encoder drops have none."""
        return {name: list(one.encoded) for name, one in self.encodings(encoder).items()}

    def _scored(
        self, model: Any, items: Sequence[str], encoder: Any
    ) -> list[tuple[str, Example, list[Encoded], list[list[SequenceScore]]]]:
        """Item, its sequences, and per sequence its scores; items without any are left out."""
        encoded = self.encoded(encoder)
        by_item = {name: encoded[name] for name in items}
        flat = [sequence for sequences in by_item.values() for sequence in sequences]
        scores = iter(sequence_scores(model, flat))
        return [
            (name, self._examples[name], sequences, [next(scores) for _ in sequences])
            for name, sequences in by_item.items()
            if sequences
        ]


class HeldoutLoss(_Examples):
    """Mean negative log-probability of the supervised tokens: nats a token, lower is better.

    Comparable between states of one tokenizer only; an item is a row, its tokens its weight.
    """

    measures: ClassVar[Mapping[str, Measure]] = {"loss": Measure("nats/token", "lower")}

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]:
        """Score `items` under `model`; rows without supervised tokens have no score."""
        scores = []
        for name, example, _, parts in self._scored(model, items, encoder):
            tokens = sum(score.tokens for part in parts for score in part)
            nats = -sum(score.log_probability for part in parts for score in part)
            if tokens:
                scores.append(_text_score(self.name, "loss", name, example, nats, float(tokens)))
        return scores


class HeldoutBits(_Examples):
    """Bits per UTF-8 byte of held-out text: comparable between tokenizers, lower is better.

    `loss` is the same log-probability in nats a token, comparable within one tokenizer.
    """

    measures: ClassVar[Mapping[str, Measure]] = {
        "bits_per_byte": Measure("bits/byte", "lower"),
        "loss": Measure("nats/token", "lower"),
    }

    def __init__(self, name: str, examples: Sequence[Example], **settings: Any) -> None:
        super().__init__(name, examples, **{"overflow": "split", **settings})

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]:
        """Score `items` under `model`; rows without supervised bytes have no score."""
        scores = []
        for name, example, sequences, parts in self._scored(model, items, encoder):
            size = sum(_bytes(sequence) for sequence in sequences)
            tokens = sum(score.tokens for part in parts for score in part)
            nats = -sum(score.log_probability for part in parts for score in part)
            if size and tokens:
                bits = nats / math.log(2)
                scores += [
                    _text_score(self.name, "bits_per_byte", name, example, bits, float(size)),
                    _text_score(self.name, "loss", name, example, nats, float(tokens)),
                ]
        return scores


class PairAccuracy(_Examples):
    """Share of held-out pairs whose chosen answer has the higher summed log-probability.

    Plain log-probabilities, without a reference: the reward that is implicit in DPO is zero
    for the parent itself, so only this form scores base, parent and tuned alike and paired.
    Equal answers cannot be told apart and are left out (`equal_pairs` counts them); a pair
    within 1e-4 nats is a tie: it counts as not preferred, and under `ties`.
    """

    measures: ClassVar[Mapping[str, Measure]] = {
        "accuracy": Measure("share", "higher"),
        "ties": Measure("share", "lower"),
        "margin": Measure("nats/pair", "higher"),
    }

    def __init__(self, name: str, examples: Sequence[Example], **settings: Any) -> None:
        different = [example for example in examples if example.chosen != example.rejected]
        self.equal_pairs = len(examples) - len(different)
        super().__init__(name, different, **settings)

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]:
        """Three scores a pair; pairs that the encoder drops have none."""
        scores = []
        for name, example, _, parts in self._scored(model, items, encoder):
            chosen, rejected = (score.log_probability for score in parts[0])
            margin = chosen - rejected
            tie = abs(margin) <= TIE_NATS
            preferred = margin > TIE_NATS
            prompt, wanted, other = (
                _shown(part) for part in (example.messages, example.chosen, example.rejected)
            )
            values = {"accuracy": float(preferred), "ties": float(tie), "margin": margin}
            for measure, value in values.items():
                scores.append(
                    ItemScore(
                        id=name,
                        suite=self.name,
                        measure=measure,
                        value=value,
                        passed=preferred if measure == "accuracy" and not tie else None,
                        prompt=prompt,
                        answer=wanted if preferred else other,
                        reference=wanted,
                    )
                )
        return scores


def _text_score(
    suite: str, measure: str, name: str, example: Example, value: float, weight: float
) -> ItemScore:
    if example.kind == "text":
        prompt, reference = "", example.text[:SHOWN_CHARACTERS]
    elif example.kind == "chat":
        prompt, reference = _shown(example.messages[:-1]), _shown(example.messages[-1:])
    else:
        prompt, reference = _shown(example.messages), _shown(example.chosen)
    return ItemScore(
        name, suite, measure, value, weight, prompt=prompt, answer="", reference=reference
    )


def _shown(messages: Sequence[Message]) -> str:
    """The messages' texts, as reports show them."""
    texts = [str(message.get("content") or "") for message in messages]
    return "\n".join(texts)[:SHOWN_CHARACTERS]


def _bytes(encoded: Encoded) -> int:
    return encoded.supervised_bytes + sum(_bytes(branch) for branch in encoded.branches)
