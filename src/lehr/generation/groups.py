"""Several samples of each prompt: it is read once, and each has random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from lehr.errors import LehrError, Problem
from lehr.generation.decode import Generated, HasNetwork, generate


def sample_groups(
    model: HasNetwork,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    max_new_tokens: int,
    stop_ids: Set[int],
    temperature: float = 1.0,
    **how: Any,
) -> list[list[Generated]]:
    """`samples` answers to each prompt, in the order of the prompts.

    how  as for `generate`. Log-probabilities are at temperature 1 and without a nucleus: the
         samples are the policy's own where nothing cuts or sharpens them.
    Raises LehrError as `generate` does, for fewer than 2 samples, and for temperature 0, where
    all samples of a prompt would be the same.
    """
    problems = []
    if samples < 2:
        problems.append(Problem("samples", "at least 2 a prompt: a group compares them", samples))
    if temperature == 0:
        problems.append(Problem("temperature", "above 0: samples must differ", temperature))
    if problems:
        raise LehrError(problems)
    written = generate(
        model,
        [prompt for prompt in prompts for _ in range(samples)],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
        **how,
    )
    return [written[start : start + samples] for start in range(0, len(written), samples)]
