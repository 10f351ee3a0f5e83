"""Which options of `lehr doctor` go together."""

from __future__ import annotations

from collections.abc import Iterable

from lehr.errors import Problem, RecipeError

# What asks for something else than a look at a curve, and what each understands besides.
TAKES = {
    "--spike": ("--stage", "--from-start"),
    "--run-tests": ("--stage",),
    "--speed": ("--trace", "--set"),
}
CURVE = ("--loss", "--vocabulary", "--accumulation", "--unigram-entropy")


def refuse_mixed(given: Iterable[str]) -> None:
    """Raise RecipeError for options that exclude each other, or that would change nothing.

    >>> refuse_mixed(["--spike", "--stage"])
    >>> refuse_mixed(["--loss", "--vocabulary"])
    """
    options = list(given)
    asked = [one for one in options if one in TAKES]
    if len(asked) > 1:
        found = " and ".join(asked)
        raise RecipeError(Problem("lehr doctor", "one of --spike, --run-tests and --speed", found))
    known = TAKES[asked[0]] if asked else CURVE
    problems = [
        Problem(
            "lehr doctor", _where(option), f"{option} {f'with {asked[0]}' if asked else 'alone'}"
        )
        for option in options
        if option not in asked and option not in known
    ]
    if problems:
        raise RecipeError(problems)


def _where(option: str) -> str:
    homes = [verb for verb, takes in TAKES.items() if option in takes]
    if not homes:
        return f"{option} for a curve only"
    return f"{option} with {' or '.join(homes)}"
