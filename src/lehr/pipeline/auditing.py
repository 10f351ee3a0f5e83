"""`lehr audit`: what is wrong with data, and exactly which tokens would be trained."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.data.accounting import gathered
from lehr.data.audit import findings
from lehr.data.encoding import Encoder
from lehr.data.preview import end_tokens, supervised_share
from lehr.data.shapes import Encoded, Example
from lehr.data.sources import SourceRows, read_source
from lehr.data.templates import Template
from lehr.errors import Problem, RecipeError
from lehr.models.tokenizer import load_tokenizer
from lehr.pipeline.new_files import require_new, write_new
from lehr.pipeline.stage_audit import mask_sample

MAX_LENGTH = 1024
CLEAN_EXPECTED = "a new file for the clean rows (--clean): nothing is overwritten"


@dataclass
class Audit:
    """What `lehr audit` found."""

    sources: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_share: float = 0.0
    answers: int = 0
    answers_without_end: int = 0
    mask_sample: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr audit --json`."""
        dropped: dict[str, int] = {}
        for source in self.sources:
            for reason, entry in source["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + entry["rows"]
        return {
            "rows": sum(source["rows"] for source in self.sources),
            "kept": sum(source["kept"] for source in self.sources),
            "dropped": dropped,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "findings": self.findings,
            "sources": self.sources,
            "masks": self.mask_sample,
            "every_end_token": self.answers_without_end == 0,
            "answers": self.answers,
            "answers_without_end": self.answers_without_end,
        }

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(found['kind'])}</td><td>{found['count']}</td>"
            f"<td>{html.escape(found['sentence'])}</td></tr>"
            for found in self.findings
        )
        return f"<p>{html.escape(str(self.as_json()['rows']))} rows</p><table>{rows}</table>"


def audit(
    paths: Sequence[Path | str],
    *,
    model: str | None = None,
    template: str = "auto",
    clean: Path | None = None,
    max_length: int = MAX_LENGTH,
) -> Audit:
    """Read and examine data files; with a model also tokenise them.

    clean  a new JSONL file of the rows without duplicates and without what was dropped
    Raises RecipeError where a file cannot be read or no row is usable, or `clean` is there already,
    all problems at once.
    """
    read: list[SourceRows] = []
    problems: list[Problem] = []
    if clean is not None:
        try:
            require_new(clean, CLEAN_EXPECTED)
        except RecipeError as error:
            problems += error.problems
    for name, path in named(paths).items():
        try:
            read.append(read_source(name, [path]))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    encoded: dict[str, list[Encoded]] = {}
    accounts = {rows.name: rows.accounting(kept=len(rows.examples), heldout=0) for rows in read}
    result = Audit([], [])
    if model is not None:
        tokenizer, stops = load_tokenizer(model, template)
        chat = Template.from_tokenizer(tokenizer) if tokenizer.chat_template else None
        encoder = Encoder(tokenizer, chat, date="2000-01-01", stop_ids=stops)
        for rows in read:
            encoded[rows.name] = _encode(rows, encoder, accounts[rows.name], max_length)
        everything = [one for part in encoded.values() for one in part]
        result.tokens = sum(one.tokens for one in everything)
        result.supervised_tokens = sum(one.supervised_tokens for one in everything)
        result.supervised_share = supervised_share(everything) if everything else 0.0
        chats = [
            one for rows in read if rows.examples[0].kind != "text" for one in encoded[rows.name]
        ]
        ended, result.answers = end_tokens(chats, encoder.stop_ids)
        result.answers_without_end = result.answers - ended
        result.mask_sample = mask_sample(chats or everything, tokenizer)
    result.sources = [account.as_json() for account in accounts.values()]
    found = findings({rows.name: rows.examples for rows in read}, encoded or None)
    result.findings = [one.as_json() for one in found]
    if clean is not None:
        write_clean(clean, [example for rows in read for example in rows.examples])
    return result


def named(paths: Sequence[Path | str]) -> dict[str, Path]:
    """Each file under a name of its own: its stem, with a number where two have the same.

    >>> list(named(["a/train.jsonl", "b/train.jsonl"]))
    ['train', 'train-2']
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        stem = re.sub(r"[^\w-]+", "_", path.stem) or "data"
        name, number = stem, 1
        while name in found:
            number += 1
            name = f"{stem}-{number}"
        found[name] = path
    return found


def _encode(rows: SourceRows, encoder: Encoder, account: Any, max_length: int) -> list[Encoded]:
    encoded: list[Encoded] = []
    dropped = []
    notes: list[str] = []
    for example in rows.examples:
        overflow: Any = "split" if example.kind == "text" else "truncate"
        one = encoder.encode(example, max_length=max_length, overflow=overflow)
        encoded += one.encoded
        notes += one.notes
        account.dropped_tokens += one.dropped_tokens
        if not one.encoded:
            dropped += one.dropped
    account.drop_kept(dropped)
    account.notes += [note for note in gathered(notes) if note not in account.notes]
    account.tokens = sum(one.tokens for one in encoded)
    account.unshared_tokens = sum(one.unshared_tokens for one in encoded)
    account.supervised_tokens = sum(one.supervised_tokens for one in encoded)
    return encoded


def write_clean(path: Path, examples: Sequence[Example]) -> None:
    """One row per distinct example, in lehr's own shapes, in a new file."""
    seen: set[str] = set()
    lines = []
    for example in examples:
        key = example.content_key()
        if key in seen:
            continue
        seen.add(key)
        lines.append(json.dumps(as_row(example), ensure_ascii=False))
    write_new(path, "\n".join(lines) + "\n", CLEAN_EXPECTED)


def as_row(example: Example) -> dict[str, Any]:
    """An example as a row that reads back to the same example."""
    if example.kind == "text":
        return {"text": example.text}
    messages = [dict(message) for message in example.messages]
    row: dict[str, Any]
    if example.kind == "chat":
        row = {"messages": messages}
    else:
        row = {"prompt": messages, "chosen": [dict(one) for one in example.chosen]}
        if example.kind == "pair":
            row["rejected"] = [dict(one) for one in example.rejected]
        else:
            row = {"prompt": messages, "completion": row["chosen"], "label": example.label}
    if example.tools:
        row["tools"] = [dict(tool) for tool in example.tools]
    return row
