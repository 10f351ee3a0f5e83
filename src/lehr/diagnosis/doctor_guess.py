"""The loss of guessing where nobody said what is guessed: known vocabularies and class counts.

Uniform guessing among N costs ln N. No tokenizer in use has a million tokens; large ones begin at
about ten thousand, so a cross-entropy of tokens that stands between their logarithms has learnt
nothing, whichever model it is.
"""

from __future__ import annotations

import math

from lehr.diagnosis.doctor_look import Look

FEW = {2: "two choices", 10: "ten classes", 100: "a hundred classes", 1000: "a thousand classes"}
TOKENS = {
    28996: "cased BERT", 30522: "BERT", 32000: "Llama 2", 49152: "SmolLM2", 50257: "GPT-2",
    50304: "GPT-2, padded", 100277: "cl100k", 128256: "Llama 3", 151936: "Qwen", 256000: "Gemma",
    262144: "Gemma 3",
}  # fmt: skip
FEWEST, MOST = 13_000, 1_000_000  # tokens of a vocabulary
EQUAL = 0.005  # of the loss: a level that is ln N
_OTHER = {"margin", "reward", "kl", "policy.kl", "clip_fraction"}


def tokens_guessed(look: Look, level: float) -> int | None:
    """About how many tokens guessing at this loss is among; None for what is no such level."""
    if look.context.guess is not None or _OTHER & set(look.curve.columns):
        return None
    return round(math.exp(level)) if math.log(FEWEST) <= level <= math.log(MOST) else None


def choices_guessed(look: Look, level: float) -> int | None:
    """2, 10, 100 or 1,000 where the level is its logarithm."""
    if look.context.guess is not None or _OTHER & set(look.curve.columns):
        return None
    near = (n for n in FEW if abs(level - math.log(n)) <= EQUAL * math.log(n))
    return next(near, None)


def of_pairs(look: Look) -> bool:
    """Whether it is a loss of pairs: it has margins, or nothing is known and it begins at ln 2."""
    if "margin" in look.curve.columns:
        return True
    if look.context.guess is not None or not len(look.loss):
        return False
    return abs(float(look.loss.value[0]) / math.log(2) - 1.0) <= 2 * EQUAL


def said(level: float) -> str:
    """What a loss of this level would be the guessing among.

    >>> said(10.825)
    'guessing among 50,000 tokens costs that (GPT-2: ln 50,257 = 10.82)'
    >>> said(9.8)
    'guessing among 18,000 tokens costs that'
    >>> said(2.3)
    'ln 10 = 2.303, guessing among ten classes'
    """
    for count, what in FEW.items():
        if abs(level - math.log(count)) <= EQUAL * math.log(count):
            return f"ln {count:,} = {math.log(count):.3f}, guessing among {what}"
    about = f"guessing among {float(f'{math.exp(level):.2g}'):,.0f} tokens costs that"
    known = min(TOKENS, key=lambda count: abs(math.log(count) - level))
    if abs(math.log(known) - level) > 0.02:
        return about
    return f"{about} ({TOKENS[known]}: ln {known:,} = {math.log(known):.2f})"
