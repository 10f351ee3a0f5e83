"""Text that every machine has: the docstrings of Python's standard library.

Modules are found and parsed, never imported or run, so the text depends on the version
of Python alone.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from lehr.data.rows import Row
from lehr.streams import content_hash

SHORTEST = 80  # characters: shorter ones say little


def docstring_rows() -> tuple[list[Row], str]:
    """(rows of {"text"}, fingerprint): one document a docstring, with the name that it explains.

    >>> rows, _ = docstring_rows()
    >>> len(rows) > 1000
    True
    """
    texts = list(dict.fromkeys(text for path in stdlib_files() for text in docstrings(path)))
    rows = [Row(value={"text": text}, line=number) for number, text in enumerate(texts, 1)]
    return rows, content_hash(texts)


def stdlib_files() -> Iterator[Path]:
    """Source files of the standard library's public modules and packages, in a fixed order."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "idlelib", "test", "this"):
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        path = Path(spec.origin)
        if path.name == "__init__.py":
            for inner in sorted(path.parent.rglob("*.py")):
                if not {"test", "tests", "idlelib"} & set(inner.parts):
                    yield inner
        else:
            yield path


def docstrings(path: Path) -> Iterator[str]:
    """Each docstring of a source file under the qualified name of what it explains."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    yield from _inside(tree, path.stem)


def _inside(node: ast.AST, name: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds):
        text = ast.get_docstring(node)
        if text is not None and len(text) >= SHORTEST:
            yield f"{name}\n\n{inspect.cleandoc(text)}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kinds):
            yield from _inside(child, f"{name}.{getattr(child, 'name', '')}")
