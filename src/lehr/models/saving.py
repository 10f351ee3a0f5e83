"""Model folders that plain transformers loads: written aside, then renamed; only safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lehr.errors import Problem, RecipeError

SHARD_BYTES = 4 << 30
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ADAPTER_LEAVES = ("lora_a", "lora_b", "rows", "row_ids")  # names that adapters add to a module
# Keys of a generation config that mean something only while sampling, with the value that
# validation takes for "not set".
_SAMPLING_KEYS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}
# Leftovers of how the base was stored; the saved weights are plain.
_STORAGE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears at `folder` complete or not at all.

    Yields a folder aside to write into. Files already in `folder` that were not
    written again are kept; a failure leaves `folder` as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        for path in aside.rglob("*"):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        if folder.exists():
            _keep_other_files(folder, aside)
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.rename(old / "was")
            aside.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(folder)
        folder.chmod(0o755)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _keep_other_files(folder: Path, aside: Path) -> None:
    written_weights = any(aside.glob("*.safetensors"))
    for path in folder.iterdir():
        stale = written_weights and (
            path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        )
        target = aside / path.name
        if target.exists() or stale:
            continue
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy2(path, target)


def write_weights(weights: Mapping[str, Tensor], folder: Path, name: str = "model") -> None:
    """`weights` as one safetensors file, or as shards with an index above 4 GiB."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in weights.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.detach().cpu().contiguous()
        size += tensor_bytes
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / f"{name}.safetensors", metadata=metadata)
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata=metadata)
        index.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def base_weights(network: Any) -> dict[str, Tensor]:
    """All weights under their transformers names, each tied weight once, without adapters.

    The tensors are the live ones: copy before changing any. Layers in four bits have none.
    """
    # A tied weight has several names; transformers makes all but one of them again at load.
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", None) or {}
    live = network.state_dict()
    weights: dict[str, Tensor] = {}
    for name, tensor in live.items():
        if name.rsplit(".", 1)[-1] in ADAPTER_LEAVES:
            continue
        source = live.get(tied.get(name, ""))
        if source is not None and source.data_ptr() == tensor.data_ptr():
            continue
        weights[name] = tensor
    return weights


def write_model(
    network: Any, tokenizer: Any, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """A complete transformers folder: config, generation config, weights, tokenizer, template.

    `weights` are cast to `dtype` one tensor at a time; tensors that are not floating
    stay as they are.
    """
    with whole_folder(folder) as aside:
        # Nothing that validation could refuse may come before the weights are on disk.
        write_weights(_original_names(network, weights, dtype), aside)
        write_config(network, aside, dtype)
        write_tokenizer(tokenizer, aside)
        generation = getattr(network, "generation_config", None)
        if generation is not None:
            normalise_generation_config(generation)
            generation.save_pretrained(str(aside))


def _original_names(
    network: Any, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> Mapping[str, Tensor]:
    cast = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    if getattr(network, "hf_quantizer", None) is not None:
        return cast  # a dequantised file: its conversions lead back to the quantised names
    # Some architectures are stored under other names than they have in memory.
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(network, cast))


def write_config(network: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json, without traces of how the base was stored or which attention it runs under."""
    config = network.config.to_dict()
    for key in _STORAGE_KEYS:
        config.pop(key, None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(network).__name__]
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Tokenizer and chat template."""
    tokenizer.save_pretrained(str(folder))


def normalise_generation_config(generation: Any) -> list[str]:
    """Make a generation config pass transformers' validation at save; say what was changed.

    Settings that contradict each other (sampling off, temperature set) load without a
    word but fail when the finished model is saved.
    """
    notices: list[str] = []
    if not getattr(generation, "do_sample", None):
        for key, neutral in _SAMPLING_KEYS.items():
            value = getattr(generation, key, None)
            if value is not None and value != neutral:
                setattr(generation, key, None)
                notices.append(
                    f"generation config: {key} {value} has no meaning while do_sample is off; "
                    "it was removed"
                )
    beams = getattr(generation, "num_beams", None)
    if beams in (None, 1):
        for key in ("early_stopping", "length_penalty"):
            value = getattr(generation, key, None)
            if value not in (None, False, 1.0):
                setattr(generation, key, None)
                notices.append(
                    f"generation config: {key} {value} has no meaning without beams; it was removed"
                )
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise RecipeError(
            Problem(
                where="generation_config.json",
                expected="settings that transformers accepts; edit or remove the file "
                f"({str(error).splitlines()[0]})",
            )
        ) from error
    return notices


def validate_generation_config(network: Any) -> list[str]:
    """Normalise the generation config of `network` (or of a LanguageModel) before training.

    Returns one notice for each setting changed. Raises RecipeError where the settings
    are refused for another reason, so that no finished training is lost at its save.
    """
    network = getattr(network, "network", network)
    generation = getattr(network, "generation_config", None)
    return [] if generation is None else normalise_generation_config(generation)


def stored_dtype(folder: Path) -> torch.dtype:
    """The widest type of the floating weights that transformers would read from `folder`."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    widest = torch.float8_e4m3fn
    for name in (one for one in names if (folder / one).is_file()):
        with safe_open(str(folder / name), "pt") as file:
            for tensor in file.keys():  # noqa: SIM118 - not a dict
                found = _DTYPES.get(file.get_slice(tensor).get_dtype())
                if found is not None and found.itemsize > widest.itemsize:
                    widest = found
    return widest
