"""How far a state moved from its parent: exact KL over the full vocabulary, per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lehr.data.packing import pack
from lehr.data.shapes import Encoded, Message, Origin
from lehr.device import moved
from lehr.evaluation.likelihood import PACK_LENGTH, scoring
from lehr.evaluation.suites import ItemScore, Measure
from lehr.generation.decode import generate
from lehr.streams import content_hash


def kl_per_sequence(
    model: Any,
    state: Mapping[str, Tensor] | None,
    encoded: Sequence[Encoded],
    *,
    reverse: bool = False,
    pack_length: int = PACK_LENGTH,
) -> list[tuple[float, int]]:
    """(sum of KL in nats, tokens) at the supervised positions of each example.

    KL(model now || model as of `state`) with the whole vocabulary in the sum, so it is
    never negative; `reverse` swaps the sides. `state` None is the bare base.
    """
    results = [(0.0, 0)] * len(encoded)
    with scoring(model):
        packing = getattr(model, "packs_exactly", True)
        for one in pack(list(enumerate(encoded)), pack_length, packing):
            if one.targets.numel() == 0:
                continue
            hidden_now, head_now = model.hidden(one), model.head().detached()
            with model.as_of(state):
                hidden_then, head_then = model.hidden(one), model.head().detached()
            sides = [(hidden_now, head_now), (hidden_then, head_then)]
            (hidden_p, head_p), (hidden_q, head_q) = reversed(sides) if reverse else sides
            values = model.divergence(
                hidden_p,
                hidden_q,
                moved(one.predict_from, hidden_now.device),
                head_p=head_p,
                head_q=head_q,
            )
            sums = one.sequence_sum(values.double().cpu())
            counts = one.sequence_sum(torch.ones(one.targets.numel(), dtype=torch.float64))
            for example, total, count in zip(
                one.sequence_example.tolist(), sums.tolist(), counts.tolist(), strict=True
            ):
                place = one.items[example]
                before_sum, before_count = results[place]
                results[place] = (before_sum + total, before_count + int(count))
    return results


class KlFromParent:
    """KL(tuned || parent) on answers that the tuned model itself samples: nats a token.

    Prompts are the caller's; answers are drawn at temperature 1 by numbers keyed by item,
    the parent's answers being irrelevant to where the tuned model goes. The score is a
    property of two states; the parent's own is 0, which `at_parent` writes down.
    """

    measures: ClassVar[Mapping[str, Measure]] = {"nats_per_token": Measure("nats/token", "lower")}

    def __init__(
        self,
        prompts: Sequence[Sequence[Message]],
        parent: Mapping[str, Tensor] | None,
        name: str = "kl",
        *,
        max_new_tokens: int = 32,
        seed: int = 0,
    ) -> None:
        self.name, self.parent = name, parent
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self._prompts = {content_hash(list(prompt))[:16]: prompt for prompt in prompts}

    @property
    def items(self) -> list[str]:
        return list(self._prompts)

    @property
    def data_hash(self) -> str:
        return content_hash([sorted(self._prompts), self.max_new_tokens, self.seed])

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]:
        """Sample an answer to each prompt and measure every one of its positions."""
        prompts = [list(encoder.prompt_ids(self._prompts[name])) for name in items]
        answers = generate(
            model,
            prompts,
            max_new_tokens=self.max_new_tokens,
            stop_ids=encoder.stop_ids,
            temperature=1.0,
            seed=self.seed,
        )
        encoded = [
            _continued(prompt, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        scores = []
        for name, answer, (nats, tokens) in zip(
            items, answers, kl_per_sequence(model, self.parent, encoded), strict=True
        ):
            scores.append(
                ItemScore(
                    id=name,
                    suite=self.name,
                    measure="nats_per_token",
                    value=nats,
                    weight=float(tokens),
                    prompt=str(self._prompts[name][-1].get("content", "")),
                    answer=encoder.decode(answer.ids),
                )
            )
        return scores


def at_parent(scores: Sequence[ItemScore]) -> list[ItemScore]:
    """The same items for the parent itself, whose divergence from itself is 0."""
    return [replace(score, value=0.0) for score in scores]


def _continued(prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
    ids = torch.tensor([*prompt, *answer], dtype=torch.long)
    supervised = torch.zeros(ids.numel(), dtype=torch.bool)
    supervised[len(prompt) :] = True
    return Encoded(ids, supervised, Origin("evaluation", "kl", 0))
