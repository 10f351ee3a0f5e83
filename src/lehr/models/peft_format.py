"""An adapter on disk, in the format of `peft`: adapter_config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lehr.errors import Problem, RecipeError
from lehr.models.adapter_layers import AdapterSpec, RowEmbedding, RowLinear
from lehr.models.adapters import (
    PEFT_PREFIX,
    adapter_modules,
    choose_targets,
    linear_layers,
    trained_tensors,
)
from lehr.models.bitsandbytes import before_peft
from lehr.recipe.adapters import ADAPTER_CONFIG as ADAPTER_CONFIG
from lehr.recipe.adapters import ADAPTER_WEIGHTS as ADAPTER_WEIGHTS


def write_adapter(
    network: Any, spec: AdapterSpec, state: Mapping[str, Tensor], base_name: str, folder: Path
) -> None:
    """The two files of an adapter; `base_name` is what peft loads the base from."""
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    content = peft_config(network, spec, base_name)
    text = json.dumps(content, indent=2, sort_keys=True, default=_plain)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def peft_config(network: Any, spec: AdapterSpec, base_name: str) -> dict[str, Any]:
    """adapter_config.json of the adapter."""
    before_peft()
    from peft import LoraConfig

    layers = linear_layers(network)
    targets: list[str] | str = sorted({name.rsplit(".", 1)[-1] for name in spec.targets})
    # peft takes name endings; where an ending would match more than was adapted, full names.
    matched = [n for n in layers if n.rsplit(".", 1)[-1] in targets]
    if len(matched) != len(spec.targets):
        targets = sorted(spec.targets)
    rows: dict[str, list[int]] | None = None
    if spec.rows:
        rows = {
            name.rsplit(".", 1)[-1]: list(spec.rows)
            for name, module in adapter_modules(network)
            if isinstance(module, RowEmbedding | RowLinear)
            and f"{PEFT_PREFIX}{name}.token_adapter.trainable_tokens_delta"
            in trained_tensors(network)
        }
    by_columns = any(isinstance(network.get_submodule(name), Conv1D) for name in spec.targets)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=by_columns,
        trainable_token_indices=rows,
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    content: dict[str, Any] = config.to_dict()
    content["target_modules"] = targets
    return content


def read_adapter(folder: Path, network: Any) -> tuple[AdapterSpec, dict[str, Tensor]]:
    """What a LoRA folder in peft's format holds, for `network`.

    Raises RecipeError for kinds of adapter that lehr does not make.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        problem = Problem(
            str(folder), f"a whole adapter ({ADAPTER_CONFIG}, {ADAPTER_WEIGHTS}): {error}"
        )
        raise RecipeError(problem) from error
    unsupported = [
        key
        for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
        if config.get(key)
    ]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unsupported:
        raise RecipeError(
            Problem(
                str(folder),
                "a plain LoRA adapter; merge others with peft first",
                ", ".join(unsupported) or config.get("peft_type"),
            )
        )
    names = [
        name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
        for name in tensors
        if name.endswith(".lora_A.weight")
    ]
    indices = config.get("trainable_token_indices") or {}
    rows = indices if isinstance(indices, list) else next(iter(indices.values()), [])
    targets = choose_targets(network, names)
    spec = AdapterSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=targets,
        rows=tuple(rows),
    )
    return spec, tensors


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
