"""Models of sizes alone: torch's meta device, where a tensor has a shape and no numbers.

A model that fits no machine at hand is made, given an adapter and run forward here in
seconds, so that a forecast counts what autograd would keep of it and guesses nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lehr.errors import Problem, RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.nf4 import quantise
from lehr.models.peft_format import ADAPTER_CONFIG
from lehr.models.precision import loaded_dtype


def has_sizes_alone(folder: Path) -> bool:
    """Whether `folder` describes a model (config.json) without holding any weights."""
    return (
        (folder / "config.json").is_file()
        and not (folder / ADAPTER_CONFIG).exists()
        and not any(folder.glob("*.safetensors*"))
        and not any(folder.glob("*.bin"))
    )


def model_of_sizes(
    folder: Path, precision: str, trust_remote_code: bool = False, four_bits: bool = False
) -> LanguageModel:
    """The model that config.json in `folder` describes, on the meta device.

    Its tokenizer is None where the folder has none. Raises RecipeError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            ).to(loaded_dtype(precision, False))
        tokenizer = None
        if any(folder.glob("tokenizer*")):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # any value in a config reaches arithmetic somewhere
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        expected = f"a config.json of a model that transformers can make ({reason})"
        raise RecipeError(Problem(str(folder), expected)) from error
    if four_bits:
        quantise(network)
    return LanguageModel(network, tokenizer, str(folder), precision=precision)
