"""An adapter as a recipe's model: added to its base once, and kept as a plain folder in the run.

What a stage then trains is an adapter over that folder. Named after the first adapter it would
load nowhere: plain tools find no base under an adapter that names an adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lehr.models.loading import load_model, resolve_spec
from lehr.pipeline.files import differing, read_json, write_json
from lehr.pipeline.folder import FOLDED
from lehr.streams import file_hash

MARK = "lehr-folded.json"


def folded_base(recipe: Any, run_folder: Path) -> tuple[Path, torch.dtype, str] | None:
    """(folder with the whole model in fp32, dtype of the base's files, notice).

    None where the recipe's model is no adapter. The folder is made where it is missing, made of
    another adapter or base, or not as it was written.
    """
    source = resolve_spec(recipe.model, recipe.folder)
    if source.kind != "adapter":
        return None
    folder = run_folder / FOLDED
    mark = read_json(folder / MARK)
    whole = isinstance(mark, dict) and mark.get("fingerprint") == source.fingerprint
    if not whole or differing(folder, mark["files"]):
        model = load_model(
            recipe.model,
            folder=recipe.folder,
            trust_remote_code=recipe.trust_remote_code,
            seed=recipe.seed,
        )
        model.save_full(folder)
        mark = {
            "fingerprint": source.fingerprint,
            "dtype": str(model.stored_dtype).removeprefix("torch."),
            "files": {p.name: file_hash(p) for p in sorted(folder.iterdir()) if p.name != MARK},
        }
        write_json(folder / MARK, mark)
    notice = (
        f"the adapter in {recipe.model} was added to its base in fp32, and the sum is kept in "
        f"{run_folder.name}/{FOLDED}: training starts from it"
    )
    return folder, getattr(torch, mark["dtype"]), notice
