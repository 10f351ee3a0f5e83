"""A recipe's data: read once, split once, encoded for the stage that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lehr.data.accounting import Accounting, gathered
from lehr.data.cache import cached_with_account
from lehr.data.docstrings import docstring_rows
from lehr.data.encoding import Encoder, Overflow
from lehr.data.formats import Dropped, convert
from lehr.data.rows import Row
from lehr.data.shapes import Encoded, Example, ExampleKind, Origin
from lehr.data.sources import SourceRows, read_source
from lehr.data.splitting import default_holdout, first_rows, split
from lehr.errors import Problem, RecipeError
from lehr.microworld.world import Microworld
from lehr.streams import content_hash

NEEDED_KIND: dict[str, ExampleKind] = {"pretrain": "text", "sft": "chat", "preference": "pair"}


@dataclass
class ReadSource:
    """One named source after reading and splitting; nothing is tokenised yet."""

    name: str
    spec: Any
    rows: SourceRows
    train: list[Example]
    heldout: list[Example]
    world: Microworld | None = None

    @property
    def kind(self) -> ExampleKind:
        return self.train[0].kind

    @property
    def data_hash(self) -> str:
        return content_hash([file["sha256"] for file in self.rows.files])


@dataclass
class EncodedSource:
    """One source as a stage sees it."""

    name: str
    train: list[Encoded]
    heldout: list[Encoded]
    accounting: Accounting


def read_all(recipe: Any) -> dict[str, ReadSource]:
    """Read and split every source that a stage uses; all problems are raised together."""
    found: dict[str, ReadSource] = {}
    problems: list[Problem] = []
    for name, kinds in needed_kinds(recipe).items():
        try:
            found[name] = _read(recipe, name, recipe.data[name], kinds)
        except RecipeError as error:
            problems += error.problems
    seeds = {source.spec.seed for source in found.values() if source.world is not None}
    if len(seeds) > 1:
        text = "one seed for all microworld sources: another seed is another world"
        problems.append(Problem("data", text, sorted(seeds)))
    if problems:
        raise RecipeError(problems)
    return found


def needed_kinds(recipe: Any) -> dict[str, set[ExampleKind]]:
    """Source -> kinds of examples that its stages train on (none for pure replay)."""
    needed: dict[str, set[ExampleKind]] = {}
    for stage in recipe.stages:
        for name in stage.mixture():
            kinds = needed.setdefault(name, set())
            if name in stage.data:
                kinds.add(NEEDED_KIND[stage.kind])
    return needed


def _read(recipe: Any, name: str, spec: Any, kinds: set[ExampleKind]) -> ReadSource:
    if len(kinds) > 1:
        said = " and ".join(sorted(kinds))
        raise RecipeError(Problem(f"data.{name}", f"one kind of rows, not {said} in two stages"))
    world = None
    if spec.microworld is not None:
        world = Microworld(seed=spec.seed)
        rows = microworld_rows(world, name, spec)
    elif spec.builtin is not None:
        rows = builtin_rows(name, spec)
    else:
        kind = next(iter(kinds), None)
        rows = read_source(name, recipe.files_of(name), spec.format, spec.on_bad_row, kind)
    if spec.rows is not None and spec.microworld is None:
        limit_rows(rows, spec.rows, recipe.seed)
    holdout = spec.holdout
    if holdout is None:
        holdout = default_holdout(len(rows.examples))
    train: list[Example] = rows.examples
    heldout: list[Example] = []
    if holdout:
        try:
            train, heldout = split(rows.examples, holdout, recipe.seed)
        except RecipeError as error:
            raise RecipeError(
                [replace(one, where=f"data.{name}.{one.where}") for one in error.problems]
            ) from None
    return ReadSource(name, spec, rows, train, heldout, world)


def limit_rows(rows: SourceRows, limit: int, seed: int) -> None:
    """Use only `limit` rows, chosen by content so that another order gives the same ones."""
    usable = len(rows.examples)
    if usable <= limit:
        return
    rows.notes.append(f"{limit} of {usable} usable rows, chosen by content")
    rows.examples = first_rows(rows.examples, limit, seed)
    rows.rows -= usable - len(rows.examples)


def microworld_rows(world: Microworld, name: str, spec: Any) -> SourceRows:
    """Rows of the synthetic world, through the same conversion as any file's rows."""
    reserved = sorted({"kind", "n", "split"} & set(spec.options))
    if reserved:
        where = f"data.{name}.options.{reserved[0]}"
        raise RecipeError(Problem(where, "a dial of the microworld; rows and kind are keys"))
    made = world.rows(spec.microworld, spec.rows, split="train", **spec.options)
    rows = [Row(value=row, line=number) for number, row in enumerate(made, 1)]
    return converted(name, f"microworld:{spec.microworld}", rows, content_hash(made))


def builtin_rows(name: str, spec: Any) -> SourceRows:
    """Text that every machine has."""
    rows, fingerprint = docstring_rows()
    return converted(name, f"builtin:{spec.builtin}", rows, fingerprint)


def converted(name: str, file: str, rows: Sequence[Row], fingerprint: str) -> SourceRows:
    """Made rows as a source, through the same conversion as any file's."""
    conversion = convert(rows, name, file, "auto")
    return SourceRows(
        name=name,
        examples=conversion.examples,
        dropped=conversion.dropped,
        shape=conversion.shape,
        files=[{"path": file, "sha256": fingerprint}],
        rows=len(conversion.examples) + len(conversion.dropped),
    )


def corpus(sources: Mapping[str, ReadSource]) -> Iterator[str]:
    """All training text of the run: what a tiny model's tokenizer is trained on."""
    for source in sources.values():
        for example in source.train:
            if example.text:
                yield example.text
            for message in (*example.messages, *example.chosen, *example.rejected):
                content = message.get("content")
                if isinstance(content, str):
                    yield content


def encode_source(
    source: ReadSource, encoder: Encoder, stage: Any, cache_folder: Path
) -> EncodedSource:
    """Tokenise both sides of a source under a stage's limits; rows that carry nothing are counted.

    Raises RecipeError where no row of the training side is left, or none is supervised.
    """
    accounting = source.rows.accounting(kept=len(source.train), heldout=len(source.heldout))
    train = _encode_side(source, "train", encoder, stage, accounting, cache_folder)
    heldout = _encode_side(source, "heldout", encoder, stage, accounting, cache_folder)
    accounting.tokens = sum(one.tokens for one in train)
    accounting.unshared_tokens = sum(one.unshared_tokens for one in train)
    accounting.supervised_tokens = sum(one.supervised_tokens for one in train)
    _require_supervision(source, stage, accounting)
    return EncodedSource(source.name, train, heldout, accounting)


def overflow_of(source: ReadSource, stage: Any) -> Overflow:
    """Only plain text can be split: the tail of a chat has no prompt."""
    if stage.overflow == "split" and source.kind != "text":
        return "truncate"
    overflow: Overflow = stage.overflow
    return overflow


def _encode_side(
    source: ReadSource,
    side: str,
    encoder: Encoder,
    stage: Any,
    accounting: Accounting,
    cache_folder: Path,
) -> list[Encoded]:
    examples = source.train if side == "train" else source.heldout
    overflow = overflow_of(source, stage)

    def build() -> tuple[list[Encoded], dict[str, Any]]:
        encoded: list[Encoded] = []
        account: dict[str, Any] = {"dropped": [], "dropped_tokens": 0}
        notes: list[str] = []
        for example in examples:
            result = encoder.encode(
                example,
                train_on=source.spec.train_on,
                max_length=stage.max_length,
                overflow=overflow,
            )
            encoded += result.encoded
            if not result.encoded:
                account["dropped"] += [
                    [bad.reason, bad.origin.file, bad.origin.line] for bad in result.dropped
                ]
            account["dropped_tokens"] += result.dropped_tokens
            notes += result.notes
        account["notes"] = gathered(notes)
        return encoded, account

    rows = [[example.content_key(), str(example.origin)] for example in examples]
    limits = [source.spec.train_on, stage.max_length, overflow]
    key = content_hash([rows, encoder.fingerprint, limits])
    encoded, account = cached_with_account(key, build, cache_folder)
    dropped = [
        Dropped(reason, Origin(source.name, file, line))
        for reason, file, line in account["dropped"]
    ]
    accounting.drop_kept(dropped, heldout=side == "heldout")
    accounting.dropped_tokens += account["dropped_tokens"]
    accounting.notes += [note for note in account["notes"] if note not in accounting.notes]
    return encoded


def _require_supervision(source: ReadSource, stage: Any, accounting: Accounting) -> None:
    if accounting.supervised_tokens > 0:
        return
    problems = [
        Problem(
            f"data.{source.name}",
            f"at least one token to train on: {accounting.dropped_rows} of {accounting.rows} rows "
            f"were dropped under max_length {stage.max_length}; raise max_length or shorten "
            "the prompts",
        )
    ]
    for reason, entry in accounting.dropped.items():
        problems.append(Problem(entry["first"], f"{reason} ({entry['rows']} rows)", says=True))
    raise RecipeError(problems)
