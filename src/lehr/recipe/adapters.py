"""A model folder that holds only an adapter: where the base lies that it names."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FOLDERS_ABOVE = 4


def is_adapter(folder: Path) -> bool:
    """True for a folder with an adapter's config and no weights of a whole model."""
    whole = [path for path in folder.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS]
    return (folder / ADAPTER_CONFIG).is_file() and not whole


def named_base(adapter: Path, folder: Path) -> str:
    """What the adapter lies over: an absolute path where there is such a folder, else a name.

    A relative path was written from some folder that the file does not name. The recipe's
    `folder` comes first, then those around the adapter: a run's own recipe.yaml, which lies
    elsewhere, finds the same base.

    Raises OSError, ValueError, KeyError and TypeError where the config names no base.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"]
    if not isinstance(base, str) or not base.strip():
        raise ValueError("base_model_name_or_path is no text")
    around = [adapter, *adapter.absolute().parents[:FOLDERS_ABOVE]]
    for start in (folder, *around, Path()):
        path = (start / Path(base).expanduser()).absolute()
        if path.is_dir():
            if path.resolve() == adapter.resolve():
                raise ValueError("it names itself")
            return str(path)
    return base
