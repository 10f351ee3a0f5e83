"""Numbers and words as a report says them: units, signs, durations, names of measures."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lehr.report.reading import mapping, number, text

SHARE_UNITS = frozenset({"share", "rate", "fraction", "probability", "accuracy", "proportion"})
UNIT_WORDS = {
    "bits_per_byte": "bits/byte",
    "bits per byte": "bits/byte",
    "nats_per_token": "nats/token",
    "nats per token": "nats/token",
}

# What a reader wants to know first about a measure: what it counts, in words.
MEANINGS = {
    "over_refusal": "harmless look-alikes refused",
    "refusal": "forbidden requests refused",
    "sycophancy": "gives in to a false claim",
    "forgetting": "loss on the parent's own text",
    "regressive_flips": "right answers, net of those lost",
    "facts": "facts answered right",
    "exact_match": "answers exactly right",
    "skills": "answers exactly right",
    "bits_per_byte": "held-out text, coded",
    "loss": "held-out answers, loss",
    "accuracy": "chosen answer preferred",
    "kl": "distance from the parent's answers",
}

PROMPT_KINDS = {
    "held out": ("Held-out question", "◇"),
    "skill": ("Skill", "◆"),
    "forbidden": ("Forbidden request", "⊘"),
    "lookalike": ("Harmless look-alike", "≈"),
    "look-alike": ("Harmless look-alike", "≈"),
    "claim": ("False claim", "?"),
    "false claim": ("False claim", "?"),
    "false_claim": ("False claim", "?"),
    "sycophancy": ("False claim", "?"),
}

VERDICTS = {
    "passed": ("✓", "passed", "good"),
    "promoted": ("✓", "promoted", "good"),
    "refused": ("✕", "refused", "bad"),
    "undetermined": ("◐", "undetermined", "unsure"),
    "running": ("▶", "running", "busy"),
    "interrupted": ("❚❚", "interrupted", "busy"),
    "diverged": ("✕", "diverged", "bad"),
    "failed": ("✕", "failed", "bad"),
    "unknown": ("·", "no result yet", "busy"),
}


def verdict_mark(verdict: str) -> tuple[str, str, str]:
    """(icon, word, colour class) of a verdict; an unknown word is shown as it is."""
    return VERDICTS.get(verdict, ("·", verdict or "no result yet", "busy"))


def is_share(unit: str) -> bool:
    """Shares of items are shown in points (hundredths)."""
    return unit.strip().lower() in SHARE_UNITS


def unit_word(unit: str) -> str:
    """The unit of a shown number.

    >>> unit_word("share"), unit_word("bits_per_byte")
    ('points', 'bits/byte')
    """
    if is_share(unit):
        return "points"
    return UNIT_WORDS.get(unit, unit.replace("_", " "))


def plain(value: object, decimals: int = 3) -> str:
    """A number without noise, or a dash where there is none.

    >>> plain(2.5), plain(None), plain(-0.25, 2)
    ('2.5', '–', '−0.25')
    """
    figure = number(value)
    if figure is None:
        return "–"
    shown = f"{figure:.{decimals}f}"
    if "." in shown:
        shown = shown.rstrip("0").rstrip(".")
    if shown in {"-0", "0"} and figure != 0:
        shown = f"{figure:.1e}"
    return shown.replace("-", "−")


def level(value: object, unit: str) -> str:
    """One score with its unit: shares as percent."""
    figure = number(value)
    if figure is None:
        return "–"
    if is_share(unit):
        return f"{figure * 100:.1f} %".replace("-", "−")
    return plain(figure)


def change(value: object, unit: str, with_unit: bool = True) -> str:
    """A signed difference: shares in points.

    >>> change(0.22, "share"), change(-0.031, "nats/token")
    ('+22 points', '−0.031 nats/token')
    """
    figure = number(value)
    if figure is None:
        return "–"
    if is_share(unit):
        shown = f"{figure * 100:+.1f}".removesuffix(".0")
    else:
        shown = f"{figure:+.3f}" if abs(figure) >= 0.0005 or figure == 0 else f"{figure:+.1e}"
    if shown.lstrip("+-").strip("0.") == "":
        shown = "0"
    shown = shown.replace("-", "−")
    return f"{shown} {unit_word(unit)}" if with_unit and unit else shown


def interval(gate: Mapping[str, Any]) -> str:
    """`[low, high]` of a gate in the unit of its difference, or nothing."""
    unit = text(gate.get("unit"))
    if number(gate.get("low")) is None and number(gate.get("high")) is None:
        return ""
    low, high = (change(gate.get(side), unit, with_unit=False) for side in ("low", "high"))
    return f"[{low.replace('–', '−∞')}, {high.replace('–', '+∞')}]"


def gate_sentence(
    gate: Mapping[str, Any], *, against: bool = False, needs: bool = False, minus: str = "−"
) -> str:
    """A gate in one phrase, the same in terminal, ledger and report.

    against  say what it was compared with
    needs    say of an undetermined one how many items would decide
    minus    the sign of numbers below 0; files and terminals take the one on a keyboard

    >>> gate = {"name": "over_refusal", "kind": "protect", "unit": "share", "limit": 0.04}
    >>> gate_sentence(gate | {"difference": 0.22, "low": 0.15, "high": 0.288})
    'over-refusal +22 points [+15, +28.8], limit +4'
    """
    name, unit = gate_name(gate), text(gate.get("unit"))
    if number(gate.get("difference")) is None:
        return f"{name}: not measured"
    if against:
        name += f" vs {text(gate.get('against')) or 'parent'}:"
    bounds = interval(gate) or "(too few items for an interval)"
    sentence = f"{name} {change(gate['difference'], unit)} {bounds}"
    if number(gate.get("limit")) is not None and gate.get("kind") != "improve":
        sentence += f", limit {change(signed_limit(gate), unit, with_unit=False)}"
    wanted = number(gate.get("n_to_decide"))
    if needs and gate.get("verdict") == "undetermined" and wanted:
        sentence += f", {wanted:,.0f} items would decide ({count(gate.get('n'))} are there)"
    return sentence.replace("−", minus)


def signed_limit(gate: Mapping[str, Any]) -> float | None:
    """The limit on the side where harm lies, whatever sign the file gives it."""
    limit = number(gate.get("limit"))
    if limit is None:
        return None
    higher_is_better = text(gate.get("direction")) == "higher"
    harm_is_positive = not higher_is_better
    if gate.get("kind") == "improve":
        harm_is_positive = not harm_is_positive
    return abs(limit) if harm_is_positive else -abs(limit)


def gate_name(gate: Mapping[str, Any]) -> str:
    """A gate's name as words."""
    name = text(gate.get("name") or gate.get("measure") or gate.get("suite") or "gate")
    if "." in name:  # a suite and its measure, as a recipe says it
        return name
    if name == "regressive_flips":  # net of gains, so "+5 points" is good: its name says otherwise
        name = f"{text(gate.get('suite')) or 'answers'} answered right"
    return name.replace("over_refusal", "over-refusal").replace("_", " ")


def meaning(gate: Mapping[str, Any]) -> str:
    """What the measure of a gate counts, in words; empty where it is not known."""
    for key in ("name", "measure", "suite"):
        # "sft-strict: over_refusal" and "chats.loss" end in what is measured.
        words = text(gate.get(key)).rsplit(": ", 1)[-1].rsplit(".", 1)[-1].replace("-", "_")
        if words in MEANINGS:
            return MEANINGS[words]
    return ""


def duration(seconds: object) -> str:
    """Seconds as people say them.

    >>> duration(42), duration(312), duration(9000)
    ('42 s', '5.2 min', '2 h 30 min')
    """
    figure = number(seconds)
    if figure is None:
        return "–"
    if figure < 90:
        return f"{figure:.0f} s" if figure >= 10 else f"{figure:.1f} s"
    if figure < 5400:
        return f"{figure / 60:.1f} min"
    hours, minutes = divmod(round(figure / 60), 60)
    return f"{hours} h {minutes} min"


def time_words(ledger: Mapping[str, Any]) -> str:
    """Wall time of a run; where stages were reused, what these took when they were made.

    >>> stages = [{"reused": True, "seconds": 90}, {"reused": False, "seconds": 30}]
    >>> time_words({"seconds": 42, "stages": stages})
    '42 s; 1 of 2 stages reused, made earlier in 1.5 min'
    """
    stages = [mapping(one) for one in ledger.get("stages") or ()]
    reused = [one for one in stages if one.get("reused") is True]
    words = duration(ledger.get("seconds"))
    if reused:
        made = sum(number(one.get("seconds")) or 0.0 for one in reused)
        words += f"; {len(reused)} of {plural(len(stages), 'stage')} reused, "
        words += f"made earlier in {duration(made)}"
    return words


def moment(value: object) -> str:
    """A time, given as ISO text or as seconds since 1970, to the minute.

    >>> moment("2026-11-30T09:16:31Z"), moment(0), moment("soon")
    ('2026-11-30 09:16 UTC', '1970-01-01 00:00 UTC', 'soon')
    """
    figure = number(value)
    try:
        if figure is not None:
            when = datetime.fromtimestamp(figure, UTC)
        elif text(value):
            when = datetime.fromisoformat(text(value)).astimezone(UTC)
        else:
            return ""
    except (ValueError, OverflowError, OSError):
        return text(value)
    return f"{when:%Y-%m-%d %H:%M} UTC"


def count(value: object) -> str:
    """A whole number with thousands separators; large ones shortened.

    >>> count(1234), count(2_345_678), count(None)
    ('1,234', '2.3 M', '–')
    """
    figure = number(value)
    if figure is None:
        return "–"
    if abs(figure) >= 1e9:
        return f"{figure / 1e9:.1f} G"
    if abs(figure) >= 1e6:
        return f"{figure / 1e6:.1f} M"
    return f"{figure:,.0f}"


def size(size_bytes: object) -> str:
    """Bytes in binary units.

    >>> size(3 * 2**30), size(700_000)
    ('3.00 GiB', '684 KiB')
    """
    figure = number(size_bytes)
    if figure is None:
        return "–"
    for unit, scale, decimals in (("GiB", 2**30, 2), ("MiB", 2**20, 0), ("KiB", 2**10, 0)):
        if abs(figure) >= scale:
            return f"{figure / scale:.{decimals}f} {unit}"
    return f"{figure:.0f} bytes"


def plural(figure: int, word: str) -> str:
    """`1 item`, `2 items`."""
    return f"{figure:,} {word}" if figure == 1 else f"{figure:,} {word}s"
