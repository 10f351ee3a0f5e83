"""Mixtures: which source the next example comes from, so that token shares come true.

A share is a share of tokens, not of rows. The rule is a fair queue (worst-case fair weighted
fair queueing, Bennett and Zhang 1996): among the sources that are not ahead of their share,
the one whose next example is due first. It has no random numbers, and after every draw
each source is within one example (the longest there is) of its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lehr.errors import Problem, RecipeError

# Room for the rounding of share x tokens; far below one token until 10^12 tokens.
_TOLERANCE = 1e-6


def checked_shares(
    shares: Mapping[str, float], sizes: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """The shares of the sources that are drawn from, in the order given.

    A share of 0 is allowed and its source is never drawn. Raises RecipeError, all problems at
    once, for a share that is negative or no number, a sum that is not 1, a source that is
    missing or empty, and an example without tokens.
    """
    problems = []
    for name, share in shares.items():
        where = f"share of {name}"
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 <= share <= 1:  # NaN fails every comparison
            problems.append(Problem(where, "a number from 0 to 1", share))
        if name not in sizes:
            problems.append(Problem(where, f"one of the sources {', '.join(sizes)}", name))
        elif share and not sizes[name]:
            problems.append(Problem(f"source {name}", "at least one example", 0))
        elif any(tokens < 1 for tokens in sizes[name]):
            problems.append(Problem(f"source {name}", "at least one token in every example"))
    if not shares:
        problems.append(Problem("data", "at least one source"))
    if not problems:
        total = math.fsum(shares.values())
        if abs(total - 1) > 1e-6:
            problems.append(Problem("shares", f"a sum of 1, their sum is {total:.6g}"))
    if problems:
        raise RecipeError(problems)
    return {name: float(share) for name, share in shares.items() if share > 0}


def next_source(
    shares: Mapping[str, float], drawn_tokens: Mapping[str, int], next_tokens: Mapping[str, int]
) -> str:
    """The source to draw from.

    shares        above 0, sum 1
    drawn_tokens  tokens drawn from each source so far
    next_tokens   tokens of the example that each source would give

    >>> next_source({"a": 0.75, "b": 0.25}, {"a": 10, "b": 0}, {"a": 10, "b": 10})
    'b'
    """
    total = sum(drawn_tokens[name] for name in shares)
    best, due_first = "", math.inf
    for name, share in shares.items():
        drawn = drawn_tokens[name]
        if drawn > share * total + _TOLERANCE:
            continue
        due = (drawn + next_tokens[name]) / share
        if due < due_first:
            best, due_first = name, due
    return best
