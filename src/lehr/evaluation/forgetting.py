"""Forgetting: how much worse a model got at the text that it knew before.

A model that lehr pretrained is asked about that text's held-out part. Of any other
model nobody has the training data, but the model can say it: texts that the base
itself writes are a sample of what it holds likely, so a rise of their bits per byte
is what was lost of it (for such texts the rise is KL(base || tuned) per byte).
"""

from __future__ import annotations

from typing import Any

from lehr.data.shapes import Example, Origin
from lehr.generation.decode import generate

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
