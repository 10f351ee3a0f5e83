"""The data of stages: names, paths, lists and shares become shares of named sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lehr.errors import Problem
from lehr.recipe import aliases
from lehr.recipe.aliases import DROP, ForeignValueError
from lehr.recipe.positions import Document, Keys, Place
from lehr.recipe.suggestions import did_you_mean
from lehr.recipe.translate import same_value, short_source, translate_source


def resolve_sources(document: Document, folder: Path) -> None:
    """Give every stage `data: {source: share}` and every path a source of its own."""
    data = document.tree.setdefault("data", {})
    if not isinstance(data, dict):
        text = "a mapping of names, as in {chats: chats.jsonl}; stages use the names"
        document.problem(("data",), text, data)
        document.tree["data"] = data = {}
    for name in data:
        if not re.fullmatch(r"[\w-]+", str(name)):
            text = "a name of letters, digits, _ and -, as in {chats: chats.jsonl}"
            document.problem(("data", name), text, name)
    stages = document.tree.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict):
            _resolve_stage(document, ("stages", index), stage, folder)
    _spread(document, (), list(document.tree["data"]))


def _resolve_stage(document: Document, keys: Keys, stage: dict[str, Any], folder: Path) -> None:
    if "data" in stage and stage["data"] is not None:
        shares = _shares(document, (*keys, "data"), stage["data"], folder)
        if shares is None:
            stage["data"] = {}
        else:
            stage["data"] = shares
    keep = stage.get("keep")
    if isinstance(keep, dict) and isinstance(keep.get("replay"), str | list):
        text = "shares of the stage's tokens, as in {web: 0.05}"
        document.problem((*keys, "keep", "replay"), text, keep["replay"])
        del keep["replay"]
    if isinstance(keep, dict) and isinstance(keep.get("replay"), dict):
        shares = _shares(document, (*keys, "keep", "replay"), keep["replay"], folder)
        keep["replay"] = shares or {}
    names = stage["data"] if isinstance(stage.get("data"), dict) else {}
    _spread(document, keys, list(names))


def _shares(document: Document, keys: Keys, value: Any, folder: Path) -> dict[str, Any] | None:
    """{source: share} of a `data` value; names that do not exist are noted and left out."""
    if isinstance(value, str):
        items: list[tuple[Keys, Any, Any]] = [(keys, value, 1.0)]
    elif isinstance(value, list):
        share = 1.0 / max(len(value), 1)
        items = [((*keys, i), item, share) for i, item in enumerate(value)]
        if len(items) > 1:
            document.notice(keys, f"a list means equal shares of tokens: {share:.3g} each")
    elif isinstance(value, dict):
        items = [((*keys, name), name, share) for name, share in value.items()]
    else:
        document.problem(keys, "a source, a path, a list of them, or shares {name: 0.5}", value)
        return None
    shares: dict[str, Any] = {}
    for at, item, share in items:
        name = _name(document, at, item, folder)
        if name is None:
            continue
        if name in shares:
            document.problem(at, f"each source once; {name} stands twice", item)
        shares[name] = share
        if place := document.places.get(at):
            document.places[(*keys, name)] = place
    if not items and keys[-1] == "data":
        document.problem(keys, "at least one source", value)
    return shares


def _name(document: Document, keys: Keys, item: Any, folder: Path) -> str | None:
    """The name of the source that `item` means; a path becomes a source."""
    data: dict[str, Any] = document.tree["data"]
    if isinstance(item, dict):
        return _inline(document, keys, item)
    if not isinstance(item, str):
        document.problem(keys, "the name of a source, or a path", item)
        return None
    if item in data:
        return item
    if not _is_path(item, folder):
        if str(document.place(("data",))) in [problem.where for problem in document.problems]:
            return None  # data itself could not be read
        names = ", ".join(data) or "none are named in data"
        document.problem(keys, f"a source ({names}) or a path{did_you_mean(item, data)}", item)
        return None
    return _inline(document, keys, {"path": item})


def _inline(document: Document, keys: Keys, source: dict[str, Any]) -> str | None:
    """Add a source that is described where it is used, named by its file."""
    data: dict[str, Any] = document.tree["data"]
    path = source.get("path")
    first = path[0] if isinstance(path, list) and path else path
    if not isinstance(first, str):
        document.problem(keys, "a source with a path", source)
        return None
    name = re.sub(r"[^\w-]+", "-", Path(first).name.split(".")[0]) or "data"
    for other, known in data.items():
        if isinstance(known, dict) and known == source:
            return str(other)
    if name in data:
        text = f"another name than {name}, which data has already: name this file in data"
        document.problem(keys, text, first)
        return None
    place = document.place(keys)
    document.put(("data", name), short_source(source), Place(place.file, place.key, place.line))
    document.places[("data", name, "path")] = place
    for key in source:
        if key != "path":
            document.places[("data", name, key)] = document.place((*keys, key))
    translate_source(document, ("data", name))
    return name


def _is_path(item: str, folder: Path) -> bool:
    looks = "/" in item or "\\" in item or Path(item).suffix != ""
    try:
        return looks or (folder / item).exists()
    except (OSError, ValueError):
        return False


def _spread(document: Document, keys: Keys, names: list[str]) -> None:
    """Another tool's data key in a stage (or at the top) belongs to each of its sources."""
    section = document.get(keys)
    for key in [key for key in section if key in aliases.SOURCE]:
        alias, value, place = aliases.SOURCE[key], section[key], document.place((*keys, key))
        try:
            converted = alias.convert(value)
        except ForeignValueError as refusal:
            document.problem((*keys, key), str(refusal), value)
            converted = DROP
        else:
            shown = "nothing to do" if converted is DROP else f"{alias.target}: {converted}"
            of = f" of {', '.join(names)}" if names and converted is not DROP else ""
            document.notices.append(f"{place}: {key} is read as {shown}{of}")
        document.remove((*keys, key))
        for name in names if converted is not DROP else []:
            _spread_one(document, ("data", name, alias.target), converted, place)


def _spread_one(document: Document, target: Keys, value: Any, place: Place) -> None:
    source = document.get(target[:-1])
    if not isinstance(source, dict):
        return
    if target[-1] not in source:
        document.put(target, value, place)
    elif not same_value(source[target[-1]], value):
        expected = f"the same as {document.place(target)}, which says {source[target[-1]]!r}"
        document.problems.append(Problem(str(place), expected, value))
