"""What a model answers: greedy answers to prompts, and choices by log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from lehr.data.shapes import Encoded, Example, Message, Origin
from lehr.evaluation.likelihood import SequenceScore, sequence_scores
from lehr.generation.decode import generate

MAX_NEW_TOKENS = 24
Normalise = Literal["none", "tokens", "bytes"]


def greedy_answers(
    model: Any,
    conversations: Sequence[Sequence[Message]],
    encoder: Any,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 64,
) -> list[str]:
    """The model's greedy answer to each conversation, control tokens removed."""
    prompts = [encoder.prompt_ids(messages) for messages in conversations]
    answers = generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=encoder.stop_ids,
        batch_size=batch_size,
    )
    return [encoder.decode(answer.ids).strip() for answer in answers]


def option_scores(
    model: Any,
    questions: Sequence[tuple[Sequence[Message], Sequence[str]]],
    encoder: Any,
    *,
    normalise: Normalise = "none",
    max_length: int = 1024,
) -> list[list[float]]:
    """Log-probability of each option as the assistant's answer, by question.

    questions: (messages, options). The end of the turn counts: an option must be a whole
    answer. normalise divides by the answer's tokens or by the option's UTF-8 bytes, so that
    long options are not punished for their length. Raises ValueError where a question and
    option do not fit into `max_length` tokens.
    """
    encoded: list[Encoded] = []
    for messages, options in questions:
        encoded.extend(_options(encoder, messages, options, max_length))
    flat = [score for part in sequence_scores(model, encoded) for score in part]
    results, start = [], 0
    for _, options in questions:
        scores = flat[start : start + len(options)]
        start += len(options)
        results.append(
            [
                _normalised(score, option, normalise)
                for score, option in zip(scores, options, strict=True)
            ]
        )
    return results


def option_tokens(encoder: Any, messages: Sequence[Message], option: str) -> int:
    """Tokens of a conversation that ends with this answer; 0 where the encoder drops it."""
    encoded = encoder.encode(_answered(messages, option), train_on="last").encoded
    return max((int(one.ids.numel()) for one in encoded), default=0)


def _answered(messages: Sequence[Message], option: str) -> Example:
    answer: Message = {"role": "assistant", "content": option}
    return Example("chat", Origin("evaluation", "choice", 0), messages=(*messages, answer))


def _options(
    encoder: Any, messages: Sequence[Message], options: Sequence[str], max_length: int
) -> list[Encoded]:
    """One example whose branches are the options; separate ones where they share no prompt."""
    alone = []
    for option in options:
        example = _answered(messages, option)
        encoding = encoder.encode(example, train_on="last", max_length=max_length, overflow="drop")
        if len(encoding.encoded) != 1:
            raise ValueError(
                f"a question of {len(messages)} messages and the option {option[:60]!r} "
                f"do not fit into {max_length} tokens"
            )
        alone.append(encoding.encoded[0])
    prompt = torch.tensor(list(encoder.prompt_ids(messages)), dtype=torch.long)
    size = int(prompt.numel())
    shared = all(
        one.ids.numel() > size
        and bool(torch.equal(one.ids[:size].long(), prompt))
        and not bool(one.supervised[:size].any())
        for one in alone
    )
    if not shared:
        return alone
    branches = tuple(
        replace(one, ids=one.ids[size:], supervised=one.supervised[size:]) for one in alone
    )
    nothing = torch.zeros(size, dtype=torch.bool)
    return [Encoded(prompt, nothing, alone[0].origin, branches)]


def _normalised(score: SequenceScore, option: str, normalise: Normalise) -> float:
    if normalise == "tokens":
        return score.log_probability / max(1, score.tokens)
    if normalise == "bytes":
        return score.log_probability / max(1, len(option.encode("utf-8", "surrogatepass")))
    return score.log_probability
