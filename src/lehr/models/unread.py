"""What lies in a model's folder and is not in the network: refused, or said by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lehr.errors import Problem, RecipeError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Computed from the config, and stored by old versions of transformers.
_COMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias)$")
_MASK = re.compile(r"\.(attn|attention)\.bias$")


def refuse_unread_weights(origin: str, unexpected: Iterable[str]) -> None:
    """Raise RecipeError where the files hold weights that the network did not take.

    unexpected  as transformers reports them: without tied heads, and without what the
                architecture declares as ignorable

    A config with fewer layers than its weights loads without an error, and is another model.
    """
    left = [name for name in sorted(unexpected) if not _COMPUTED.search(name)]
    masks = [name for name in left if _MASK.search(name)]
    shapes = _shapes(Path(origin), masks) if masks else {}
    left = [name for name in left if not _is_mask(shapes.get(name, ()))]
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise RecipeError(
            Problem(
                origin,
                "weight files that hold the model of its config and nothing else; not in that "
                f"model: {', '.join(left[:5])}{more} (does config.json belong to these weights?)",
                f"{len(left)} tensors",
            )
        )


def weight_files(folder: Path) -> list[str]:
    """Names of the files that transformers reads the weights from, in its order of choice."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return ["adapter_model.safetensors"]
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return [WHOLE]
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted({str(name) for name in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # refused where the folder is checked


def unread_notices(folder: Path) -> list[str]:
    """A line for files that look like weights and are not read; [] where there are none."""
    if not folder.is_dir():
        return []
    read = set(weight_files(folder))
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    pickles = [name for name in pickles if name != "training_args.bin"]
    others = [name for name in names if name.endswith(".safetensors") and name not in read]
    notices = []
    if pickles:
        notices.append(
            f"{_listed(pickles)} in {folder.name}: not read. A pickle can run code; the weights "
            "come from the .safetensors beside it"
        )
    if others:
        notices.append(
            f"{_listed(others)} in {folder.name}: not read. The weights come from "
            f"{_listed(sorted(read))}"
        )
    return notices


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shapes(folder: Path, names: Sequence[str]) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    for file in weight_files(folder) if folder.is_dir() else []:
        try:
            with safe_open(str(folder / file), "pt") as content:
                there = set(content.keys())
                for name in names:
                    # The head's name for the body's weights may lack a prefix.
                    stored = next((n for n in there if n == name or name.endswith("." + n)), None)
                    if stored is not None:
                        found[name] = content.get_slice(stored).get_shape()
        except (OSError, SafetensorError):
            continue
    return found


def _is_mask(shape: Sequence[int]) -> bool:
    """1 x 1 x n x n: a triangle of ones, not a bias."""
    return len(shape) == 4 and list(shape[:2]) == [1, 1] and shape[2] == shape[3]
