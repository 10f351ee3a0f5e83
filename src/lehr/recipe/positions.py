"""YAML 1.2 text to a plain tree, with the line of every key.

The tree holds dicts, lists and scalars only; `Document.places` remembers where each
path of it was written, so that a problem found much later can still name the line.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError

Keys = tuple[str | int, ...]

MAX_NODES = 20_000  # a recipe has hundreds; more is an alias bomb
CORE = "tag:yaml.org,2002:"
# What each kind of node may be. YAML 1.2 has no dates and no sets; an unquoted date is text.
TAGS = {
    "scalar": ("str", "int", "float", "bool", "null", "timestamp", "merge", "value"),
    "sequence": ("seq",),
    "mapping": ("map",),
}


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and line, or an override of the command line."""

    file: str
    key: str
    line: int | None = None

    def __str__(self) -> str:
        at = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{at} {self.key}".rstrip()


def dotted(keys: Keys) -> str:
    """The key path as people and `--set` write it: stages.0.learning_rate."""
    return ".".join(str(key) for key in keys)


@dataclass
class Document:
    """A recipe before validation: its tree, and the place of every path in it."""

    name: str
    tree: dict[str, Any]
    places: dict[Keys, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def place(self, keys: Keys) -> Place:
        """Where `keys` was written; for a key that is absent, the section that lacks it."""
        if keys in self.places:
            return self.places[keys]
        shown, line, file = self.shown(keys), None, self.name
        for length in range(len(keys) - 1, 0, -1):
            if nearest := self.places.get(keys[:length]):
                line, file = nearest.line, nearest.file
                break
        return Place(file, shown, line)

    def shown(self, keys: Keys) -> str:
        """The path with the kind of a stage in it: stages.0.sft.learning_rate."""
        if len(keys) > 2 and keys[0] == "stages" and isinstance(keys[1], int):
            stages = self.tree.get("stages")
            if isinstance(stages, list) and keys[1] < len(stages):
                stage = stages[keys[1]]
                kind = stage.get("kind") if isinstance(stage, dict) else None
                if isinstance(kind, str):
                    return dotted((*keys[:2], kind, *keys[2:]))
        return dotted(keys)

    def problem(self, keys: Keys, expected: str, value: object = None) -> None:
        """Note that what stands at `keys` is wrong."""
        problem = Problem(str(self.place(keys)), expected, value)
        if problem not in self.problems:
            self.problems.append(problem)

    def notice(self, keys: Keys, text: str) -> None:
        """Note something that the user should know and that refuses nothing."""
        line = f"{self.place(keys)}: {text}"
        if line not in self.notices:
            self.notices.append(line)

    def get(self, keys: Keys) -> Any:
        """The value at `keys`, or None."""
        node: Any = self.tree
        for key in keys:
            inside = isinstance(node, dict) and key in node
            if isinstance(node, list) and isinstance(key, int):
                inside = key < len(node)
            if not inside:
                return None
            node = node[key]
        return node

    def put(self, keys: Keys, value: Any, place: Place | None = None) -> None:
        """Set the value at `keys`, making the mappings on the way."""
        node: Any = self.tree
        for depth, key in enumerate(keys[:-1], start=1):
            if isinstance(node, dict) and not isinstance(node.get(key), dict | list):
                node[key] = {}
                if place is not None:
                    self.places.setdefault(keys[:depth], place)
            node = node[key]
        node[keys[-1]] = value
        if place is not None:
            self.places[keys] = place

    def remove(self, keys: Keys) -> Any:
        """Take the value at `keys` out of the tree and return it."""
        parent = self.get(keys[:-1])
        return parent.pop(keys[-1], None) if isinstance(parent, dict) else None

    def move(self, old: Keys, new: Keys) -> None:
        """Rename a path; its own and its inner places come along."""
        value = self.remove(old)
        moved = {new + k[len(old) :]: p for k, p in self.places.items() if k[: len(old)] == old}
        self.put(new, value)
        self.places.update(moved)


def read_text(path: Path) -> str:
    """The text of a recipe file: UTF-8, or UTF-16 where a byte order mark says so.

    Raises RecipeError for a file that is missing, a folder, unreadable or not text.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        near = [p.name for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        hint = f"; recipes there: {', '.join(near[:5])}" if near else ""
        raise RecipeError(Problem(str(path), f"a recipe file (no such file{hint})")) from None
    except OSError as error:
        raise RecipeError(Problem(str(path), f"a readable file ({error.strerror})")) from None
    encoding = "utf-8-sig"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        expected = "UTF-8 text; save the file with that encoding"
        bad = f"byte 0x{raw[error.start]:02x}"
        raise RecipeError(Problem(f"{path}:{line}", expected, bad)) from None


def parse(text: str, name: str) -> Document:
    """A Document from YAML text. Duplicate keys are noted, both lines named.

    Raises RecipeError with line and column where the text is no YAML.
    """
    root = _compose(text, name)
    document = Document(name, {})
    if root is None:
        raise RecipeError(Problem(name, "a recipe with the keys model, data and stages (empty)"))
    tree = _Builder(document).build(root, ())
    if not isinstance(tree, dict):
        found = "a list" if isinstance(tree, list) else repr(tree)
        expected = f"a mapping with the keys model, data and stages at the top, not {found}"
        raise RecipeError([*document.problems, Problem(f"{name}:1", expected)])
    document.tree = tree
    return document


def parse_value(text: str, name: str) -> Any:
    """The value of an override: one YAML value, written on one line."""
    root = _compose(text, name)
    if root is None:
        return None
    document = Document(name, {})
    value = _Builder(document).build(root, ())
    if document.problems:
        raise RecipeError(document.problems)
    return value


def _compose(text: str, name: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    if directive := re.search(r"^%YAML +(?!1\.2\b)(\S*)", text, re.MULTILINE):
        line = text[: directive.start()].count("\n") + 1
        raise RecipeError(Problem(f"{name}:{line}", "YAML 1.2", directive.group(1)))
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        bad = f"character U+{ord(text[error.position]):04X}"
        raise RecipeError(Problem(f"{name}:{line}", "printable text", bad)) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        why = " ".join(filter(None, (error.context, error.problem)))
        if "\\t" in why:
            why += "; indent with spaces"
        raise RecipeError(Problem(where, f"readable YAML ({why})")) from None
    except (YAMLError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecipeError(Problem(name, f"readable YAML ({why})")) from None


class _Builder:
    """Plain values from YAML nodes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: set[int] = set()
        self.nodes = 0

    def build(self, node: Any, keys: Keys) -> Any:
        self.nodes += 1
        if id(node) in self.open or self.nodes > MAX_NODES:
            why = "an alias that contains itself" if id(node) in self.open else "too many values"
            where = f"{self.document.name}:{node.start_mark.line + 1}"
            raise RecipeError(Problem(where, f"plain data (this is {why})"))
        self.open.add(id(node))
        try:
            return self._value(node, keys)
        finally:
            self.open.discard(id(node))

    def _value(self, node: Any, keys: Keys) -> Any:
        tag = str(node.tag)
        if tag.removeprefix(CORE) not in TAGS[node.id] or not tag.startswith(CORE):
            self._problem(node, keys, "a plain value; tags are not read", tag)
            return None
        if node.id == "scalar":
            return _scalar(tag.removeprefix(CORE), node.value)
        if node.id == "sequence":
            return [self._item(item, (*keys, i)) for i, item in enumerate(node.value)]
        return self._mapping(node, keys)

    def _item(self, node: Any, keys: Keys) -> Any:
        self._remember(node, keys)
        return self.build(node, keys)

    def _mapping(self, node: Any, keys: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        merged: list[Any] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == CORE + "merge":
                merged.append(value_node)
                continue
            if key_node.id != "scalar" or not str(key_node.tag).startswith(CORE):
                self._problem(key_node, keys, "a plain word as key")
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in first:
                shown = dotted((*keys, key))
                expected = f"each key once; {key} stands in lines {first[key]} and {line}"
                place = Place(self.document.name, shown, line)
                self.document.problems.append(Problem(str(place), expected))
                continue
            first[key] = line
            self._remember(key_node, (*keys, key))
            result[key] = self.build(value_node, (*keys, key))
        for value_node in merged:
            for key, value in self._merged(value_node, keys):
                result.setdefault(key, value)
        return result

    def _merged(self, node: Any, keys: Keys) -> Iterator[tuple[str, Any]]:
        """Key-value pairs of `<<: *anchor`; what the mapping says itself wins."""
        value = self.build(node, keys)
        parts: Sequence[Any] = value if isinstance(value, list) else [value]
        for part in parts:
            if not isinstance(part, Mapping):
                self._problem(node, keys, "a mapping after <<")
                continue
            yield from part.items()

    def _remember(self, node: Any, keys: Keys) -> None:
        place = Place(self.document.name, dotted(keys), node.start_mark.line + 1)
        self.document.places.setdefault(keys, place)

    def _problem(self, node: Any, keys: Keys, expected: str, value: object = None) -> None:
        place = Place(self.document.name, dotted(keys), node.start_mark.line + 1)
        self.document.problems.append(Problem(str(place), expected, value))


def _scalar(kind: str, text: str) -> Any:
    """A YAML 1.2 core scalar. Whatever is no number, truth value or null stays text."""
    plain = text.replace("_", "").lower()
    try:
        if kind == "int":
            sign, digits = (-1 if plain.startswith("-") else 1), plain.lstrip("+-")
            base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
            return sign * int(digits[2:] if base != 10 else digits, base)
        if kind == "float":
            return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return text
    if kind == "bool":
        return plain == "true"
    return None if kind == "null" else text
