"""GGUF files: dequantised by transformers once, then kept as a normal folder."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lehr.errors import Problem, RecipeError
from lehr.models.saving import base_weights, write_model

GGUF_MAGIC = b"GGUF"


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model of a GGUF file as a plain transformers folder, atomically.

    The weights are dequantised in fp32 and saved in `dtype`; config, tokenizer, chat
    template and generation config come from the file's metadata.

    Raises RecipeError where the file is no GGUF file, is damaged, or holds an
    architecture that transformers cannot dequantise.
    """
    check_gguf(file)
    try:
        network, tokenizer = _read(file)
    except (ValueError, KeyError, NotImplementedError, OSError, RuntimeError, IndexError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            Problem(str(file), f"a GGUF file that transformers can dequantise ({reason})")
        ) from error
    write_model(network, tokenizer, base_weights(network), folder, dtype)
    return folder


def check_gguf(file: Path) -> None:
    """Raise RecipeError where `file` does not exist or does not begin as a GGUF file does."""
    if not file.is_file():
        raise RecipeError(Problem(str(file), "an existing .gguf file"))
    with file.open("rb") as stream:
        if stream.read(4) != GGUF_MAGIC:
            raise RecipeError(Problem(str(file), "a GGUF file (its first bytes are not GGUF)"))


def _read(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The bar of the dequantisation goes to stderr whatever transformers' settings are.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        network = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    return network, tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars or warnings of transformers while it loads: lehr says what matters itself."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
