"""A source of a recipe: its files read, converted, counted and hashed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lehr.data.accounting import Accounting
from lehr.data.formats import UNKNOWN, Conversion, Dropped, convert
from lehr.data.hub import hub_rows, is_hub_id
from lehr.data.reading import read_rows
from lehr.data.shapes import Example, ExampleKind
from lehr.errors import Problem, RecipeError
from lehr.streams import file_hash

_PROBLEMS_SHOWN = 20
KNOWN_SHAPES = (
    "text; messages; prompt and completion; prompt, chosen and rejected; prompt, completion and "
    "label; instruction, input and output; conversations"
)


@dataclass
class SourceRows:
    """All rows of a source: kept + dropped == rows.

    files   [{"path", "sha256"}]
    kinds   how many examples of each kind
    notes   sentences for the audit
    """

    name: str
    examples: list[Example] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    shape: str = UNKNOWN
    files: list[dict[str, str]] = field(default_factory=list)
    rows: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> Counter[ExampleKind]:
        return Counter(example.kind for example in self.examples)

    def accounting(self, kept: int, heldout: int) -> Accounting:
        """The accounting after the split, before encoding."""
        accounting = Accounting(
            name=self.name,
            files=self.files,
            shape=self.shape,
            rows=self.rows,
            kept=kept,
            heldout=heldout,
            notes=list(self.notes),
        )
        accounting.drop_read(self.dropped)
        accounting.check()
        return accounting


def read_source(
    name: str,
    files: Sequence[Path | str],
    format: str = "auto",
    on_bad_row: str = "drop",
    kind: ExampleKind | None = None,
) -> SourceRows:
    """Reads every file of a source; drops what cannot be used, with reasons.

    `kind` is what the stage needs: rows of another kind are dropped too. Raises RecipeError with
    all problems: files that cannot be read, no row, no usable row, or with on_bad_row="stop" any
    dropped row.
    """
    source = SourceRows(name)
    problems: list[Problem] = []
    shapes: Counter[str] = Counter()
    columns: tuple[str, ...] = ()
    if not files:
        raise RecipeError(Problem(f"data.{name}", "at least one file"))
    for file in files:
        try:
            conversion, fingerprint = _read_file(name, file, format)
        except RecipeError as error:
            problems += error.problems
            continue
        source.files.append({"path": str(file), "sha256": fingerprint})
        source.examples += conversion.examples
        source.dropped += conversion.dropped
        source.notes += _notes(conversion)
        shapes += conversion.shapes
        columns = columns or conversion.columns
    if problems:
        raise RecipeError(problems)
    source.rows = len(source.examples) + len(source.dropped)
    if shapes:
        source.shape = shapes.most_common(1)[0][0]
    if kind is not None:
        _require_kind(source, kind)
    elif len(source.kinds) > 1:
        source.notes.append("rows of several kinds: " + _listed(source.kinds))
    if len(shapes) > 1:
        source.notes.append("rows of several shapes: " + _listed(shapes))
    _refuse(source, columns, on_bad_row)
    return source


def _read_file(name: str, file: Path | str, format: str) -> tuple[Conversion, str]:
    path = Path(file)
    if isinstance(file, str) and is_hub_id(file) and not path.exists():
        rows, fingerprint = hub_rows(file)
        return convert(rows, name, file, format), fingerprint
    try:
        return convert(read_rows(path), name, str(file), format), file_hash(path)
    except OSError as error:
        raise RecipeError(
            Problem(str(file), f"a file that can be read ({error.strerror})")
        ) from None


def _notes(conversion: Conversion) -> list[str]:
    return [
        f"{text} ({_counted(rows)}, first {first})"
        for text, (rows, first) in conversion.notes.items()
    ]


def _counted(rows: int) -> str:
    return f"{rows:,} row{'' if rows == 1 else 's'}"


def _listed(counts: Counter[ExampleKind] | Counter[str]) -> str:
    return ", ".join(f"{rows} {name}" for name, rows in counts.most_common())


def _require_kind(source: SourceRows, kind: ExampleKind) -> None:
    """Drops the examples of other kinds."""
    others = [example for example in source.examples if example.kind != kind]
    source.examples = [example for example in source.examples if example.kind == kind]
    source.dropped += [
        Dropped(f"a {example.kind} where a {kind} is needed", example.origin) for example in others
    ]


def _refuse(source: SourceRows, columns: tuple[str, ...], on_bad_row: str) -> None:
    where = f"data.{source.name}"
    if source.rows == 0:
        files = ", ".join(file["path"] for file in source.files)
        raise RecipeError(Problem(where, f"at least one row; nothing is in {files}"))
    if on_bad_row == "stop" and source.dropped:
        problems = [
            Problem(str(dropped.origin), f"a usable row: {dropped.reason}")
            for dropped in source.dropped[:_PROBLEMS_SHOWN]
        ]
        hidden = len(source.dropped) - len(problems)
        if hidden:
            problems.append(Problem(where, f"no bad row (on_bad_row: stop); {hidden} more"))
        raise RecipeError(problems)
    if not source.examples:
        raise RecipeError(_nothing_left(source, columns, where))


def _nothing_left(source: SourceRows, columns: tuple[str, ...], where: str) -> list[Problem]:
    total = Accounting(source.name)
    total.drop_read(source.dropped)
    problems = [
        Problem(where, f"at least one usable row: {source.rows} of {source.rows} were dropped")
    ]
    for reason, entry in total.dropped.items():
        problems.append(Problem(entry["first"], f"{reason} ({_counted(entry['rows'])})", says=True))
    if columns:
        found = ", ".join(columns[:12])
        problems.append(
            Problem(where, f"columns of a known shape ({KNOWN_SHAPES}); found: {found}")
        )
    return problems
