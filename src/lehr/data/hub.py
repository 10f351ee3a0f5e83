"""Data sets of the Hugging Face hub, through the `datasets` library (extra `hub`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lehr.data.rows import Row
from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash

_ID = re.compile(r"(?:hub:)?(?P<name>[\w.-]+/[\w.-]+)(?::(?P<split>[\w\[\]%:-]+))?")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz")


def is_hub_id(text: str) -> bool:
    """True for `owner/name`, `owner/name:split`, `hub:owner/name`.

    >>> is_hub_id("owner/chats"), is_hub_id("owner/chats:train"), is_hub_id("data/chats.jsonl")
    (True, True, False)
    """
    match = _ID.fullmatch(text)
    return match is not None and ".." not in text and not match["name"].endswith(_FILE_SUFFIXES)


def hub_rows(text: str) -> tuple[Iterator[Row], str]:
    """(rows, fingerprint) of a hub data set; the split is `train` unless `:split` follows.

    Raises RecipeError with the remedy where `datasets` is missing or the hub refuses.
    """
    match = _ID.fullmatch(text)
    assert match is not None, "ask is_hub_id first"
    try:
        import datasets
    except ImportError:
        raise RecipeError(
            Problem(
                text,
                "a file that exists; for a data set of the hub install the extra: "
                "pip install 'lehr[hub]'",
            )
        ) from None
    name, part = match["name"], match["split"] or "train"
    try:
        dataset: Any = datasets.load_dataset(name, split=part)
    except Exception as error:  # its errors share no base: all mean that there is no data
        raise RecipeError(
            Problem(
                text,
                f"a file that exists, or a hub data set that can be loaded, split {part} "
                f"({type(error).__name__})",
            )
        ) from None
    fingerprint = content_hash([name, part, str(getattr(dataset, "_fingerprint", ""))])
    return _rows(dataset), fingerprint


def _rows(dataset: Any) -> Iterator[Row]:
    for line, value in enumerate(dataset, start=1):
        yield Row(dict(value), line)
