"""From what a recipe calls a model to a LanguageModel that attends over segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lehr.device import CPU
from lehr.errors import Problem, RecipeError
from lehr.models import fetch as fetching
from lehr.models.bitsandbytes import require_bitsandbytes
from lehr.models.finite import refuse_nonfinite
from lehr.models.gguf_files import convert_gguf, quiet_transformers
from lehr.models.language_model import LanguageModel
from lehr.models.nf4 import BLOCK, MARK, quantise, quantised_layers, round_trip
from lehr.models.precision import loaded_dtype
from lehr.models.saving import stored_dtype, validate_generation_config
from lehr.models.sources import ModelSource, base_of_adapter, model_fingerprint, resolve_spec
from lehr.models.tiny import make_tiny
from lehr.models.unread import refuse_unread_weights, unread_notices
from lehr.models.vocabulary import add_control_tokens, add_stop_id

__all__ = [
    "ModelSource",
    "load_model",
    "model_fingerprint",
    "require_template",
    "resolve_spec",
    "set_template",
    "template_source",
]
_TINY = "tiny:"


def load_model(
    spec: str,
    *,
    corpus: Callable[[], Iterable[str]] | None = None,
    template: str = "auto",
    folder: Path | None = None,
    precision: str = "fp32",
    trust_remote_code: bool = False,
    seed: int = 0,
    all_weights: bool = False,
    four_bits: bool = False,
    progress: fetching.Progress | None = None,
    device: torch.device = CPU,
) -> LanguageModel:
    """The model that a recipe names, ready to attend over segments.

    corpus       gives texts to train a tiny model's tokenizer on
    template     auto (the model's own, if it has one), chatml, or a file with Jinja text
    folder       where relative paths start
    precision    see lehr.models.precision: bf16 keeps frozen weights in bf16, and so on
    all_weights  weights that all train are loaded as they train: in fp32 but for pure_bf16
    four_bits    linear layers are put into NF4 (models/nf4), made of the files' own numbers
    progress     called with a line per slow step
    device       where it is put when it is whole; it is read and made on the CPU

    Raises RecipeError, never another error, for what a user can cause.
    """
    if four_bits:
        require_bitsandbytes()
    source = resolve_spec(spec, folder)
    dtype = loaded_dtype(precision, all_weights)
    notices: list[str] = []
    origin: str | None = None
    adapter: Path | None = None
    stored = torch.float32
    if source.kind == "tiny":
        if corpus is None:
            raise RecipeError(Problem("model", "text in the recipe's data for a tiny model", spec))
        network, tokenizer = make_tiny(spec.removeprefix(_TINY), corpus(), seed)
        network.to(dtype)
    else:
        origin = str(_local(source, progress))
        if source.kind == "adapter":
            adapter = Path(origin)
            origin = str(_local(base_of_adapter(adapter, folder), progress))
        # Folding rounds once, at its end: whatever computes later, it adds in fp32.
        first: torch.dtype | None = dtype if adapter is None else torch.float32
        if four_bits and adapter is None:
            first = None  # codes are made of the files' own numbers, in every precision
        network, tokenizer, stored = _read(origin, first, trust_remote_code, adapter)
        notices += unread_notices(Path(origin))
    if adapter is not None:
        notices += unread_notices(adapter)
        network = _folded(network, tokenizer, adapter, notices)
        if not four_bits:
            _cast(network, dtype)
    if origin is not None:
        refuse_nonfinite(spec, network)
    new_rows = set_template(network, tokenizer, template, folder)
    _pad_apart(network, tokenizer)
    notices += validate_generation_config(network)
    if four_bits:
        notices += _into_four_bits(network, dtype, source)
    model = LanguageModel(
        network,
        tokenizer,
        spec,
        precision=precision,
        # A folded adapter is a new base that exists nowhere as a file of its own.
        source=None if adapter is not None else origin,
        new_rows=new_rows,
        seed=seed,
        notices=notices,
        stored_dtype=stored,
    )
    return model.to(device)


def _into_four_bits(network: Any, dtype: torch.dtype, source: ModelSource) -> list[str]:
    """Quantise, and let the other weights compute in `dtype`; what to tell the user."""
    layers = quantise(network, dtype)
    _cast(network, dtype)
    found = [f"{layers} linear layers are held in four bits (NF4)"]
    if source.kind == "gguf":
        found.append(f"{source.spec}: what its own format rounded is rounded again by NF4")
    if source.kind == "adapter":
        found.append("base and adapter are one sum now: NF4 rounds the adapter as well")
    cut = sum(one.shape[1] % BLOCK != 0 for one in quantised_layers(network).values())
    if cut:
        found.append(
            f"{cut} of them have rows that are not whole blocks of {BLOCK} weights: right here, "
            "misread by bitsandbytes 0.50 itself on processors with AVX-512"
        )
    return found


def _cast(network: Any, dtype: torch.dtype) -> None:
    """Weights alone: the angles of rotary positions stay in fp32."""
    for weight in network.parameters():
        weight.data = weight.data.to(dtype)


def _local(source: ModelSource, progress: fetching.Progress | None) -> Path | str:
    if source.kind == "known":
        return source.path or fetching.fetch(source.spec, progress=progress)
    if source.kind == "gguf":
        assert source.path is not None
        target = fetching.models_folder() / f"gguf-{source.path.stem}-{source.fingerprint[:12]}"
        if not fetching.is_whole(target):
            if progress:
                progress(f"converting {source.path.name} once; the next start is fast")
            convert_gguf(source.path, target)
        return target
    return source.spec if source.path is None else source.path.resolve()


def _read(
    origin: str, dtype: torch.dtype | None, trust_remote_code: bool, adapter: Path | None
) -> tuple[Any, Any, torch.dtype]:
    """(network in `dtype`, tokenizer, the dtype that the files hold).

    dtype  None: that of the files, whose numbers are wanted as they are; none may be quantised
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokens_from = origin
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        tokens_from = str(adapter)
    here = Path(origin).exists()  # a folder needs no network
    if not here and not fetching.hub_reachable():
        origin, here = _cached_snapshot(origin), True
        tokens_from = tokens_from if adapter is not None else origin
    try:
        with quiet_transformers():
            settings = AutoConfig.from_pretrained(
                origin, trust_remote_code=trust_remote_code, local_files_only=here
            )
            # Read before the weights: loading writes its own dtype into the config.
            stored = getattr(settings, "dtype", None)
            if dtype is None:
                _refuse_quantised(origin, settings)
                dtype = _files_type(origin, stored)
            network, report = AutoModelForCausalLM.from_pretrained(
                origin,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=here,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                tokens_from, trust_remote_code=trust_remote_code, local_files_only=here
            )
    except RecipeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise RecipeError(_load_problem(origin, error)) from error
    except SafetensorError as error:
        raise RecipeError(Problem(origin, f"whole .safetensors files ({error})")) from error
    except MemoryError:
        raise
    except Exception as error:  # any value in a config reaches arithmetic somewhere
        raise RecipeError(_load_problem(origin, error)) from error
    missing = sorted(report.get("missing_keys") or ())
    mismatched = [str(entry) for entry in report.get("mismatched_keys") or ()]
    if missing or mismatched:
        raise RecipeError(
            Problem(
                origin,
                "all weights of its config (else they would be random); missing or of another "
                f"shape: {', '.join([*missing, *mismatched][:3])}",
                f"{len(missing) + len(mismatched)} tensors",
            )
        )
    refuse_unread_weights(origin, report.get("unexpected_keys") or ())
    network.eval()
    if Path(origin).is_dir():  # the files themselves: a config may say something else
        stored = stored_dtype(Path(origin))
    return network, tokenizer, stored if isinstance(stored, torch.dtype) else torch.float32


def _refuse_quantised(origin: str, settings: Any) -> None:
    """A base that is in few bits already would be rounded twice."""
    how = getattr(settings, "quantization_config", None)
    if how is not None:
        word = how.get("quant_method") if isinstance(how, dict) else type(how).__name__
        expected = "a model that is not quantised yet, for qlora; this one's files hold codes"
        raise RecipeError(Problem(origin, expected, word or "quantization_config"))


def _files_type(origin: str, named: Any) -> torch.dtype:
    """What to read files in without changing a number: their own type, or fp32."""
    own = stored_dtype(Path(origin)) if Path(origin).is_dir() else named
    return own if own in (torch.bfloat16, torch.float16) else torch.float32


def _cached_snapshot(hub_id: str) -> str:
    """The hub's own cached folder of `hub_id`, instead of minutes of retries without a network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(found, str):
        raise RecipeError(_load_problem(hub_id, OSError("no connection, and not in its cache")))
    return str(Path(found).parent)


def _load_problem(origin: str, error: Exception) -> Problem:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if "trust_remote_code" in str(error):
        return Problem(
            origin,
            "an architecture that transformers knows; this one brings its own code, which runs "
            "only with trust_remote_code: true (it is then written to the ledger)",
        )
    if not Path(origin).exists():
        return Problem(
            "model",
            "a hub id that can be reached, or a model on this machine: a local folder, a .gguf "
            f"file, or `lehr fetch {sorted(fetching.KNOWN)[0]}` ({reason})",
            origin,
        )
    return Problem(origin, f"a model that transformers can load ({reason})")


def _folded(network: Any, tokenizer: Any, adapter: Path, notices: list[str]) -> Any:
    if len(tokenizer) > network.get_input_embeddings().weight.shape[0]:
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if (adapter / MARK).is_file():
        round_trip(network)
        notices.append(f"the base of {adapter} was put into four bits (NF4), as it was trained")
    holder = LanguageModel(network, tokenizer, str(adapter))
    holder.load_adapter(adapter)
    holder.fold_adapter()
    notices.append(
        f"the adapter in {adapter} was added to its base in fp32: training starts from both"
    )
    return holder.network


def set_template(
    network: Any, tokenizer: Any, template: str, folder: Path | None = None
) -> list[int]:
    """Set the chat template; returns vocabulary ids whose rows must train.

    `auto` keeps the model's own (or none: text alone needs none; `require_template`
    refuses chats then). Otherwise its control tokens are added where they are missing,
    and all of them count as untrained: a model without this template never saw them in
    their role.
    """
    if template == "auto":
        return []
    from lehr.data.templates import control_tokens

    source = template_source(template, folder)
    if tokenizer.chat_template == source:
        return []
    tokens = control_tokens(source)  # raises RecipeError for Jinja that cannot be read
    add_control_tokens(network, tokenizer, tokens)
    tokenizer.chat_template = source
    ids = sorted(int(i) for i in tokenizer.convert_tokens_to_ids(tokens)) if tokens else []
    end = _end_of_turn(source, tokens)
    if end is not None:
        add_stop_id(network, int(tokenizer.convert_tokens_to_ids(end)))
    return ids


def template_source(template: str, folder: Path | None = None) -> str:
    """Jinja text of `chatml` or of a file. Raises RecipeError where there is no such file."""
    if template == "chatml":
        from lehr.data.templates import CHATML

        return CHATML
    path = (folder or Path()) / Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            Problem(
                "template", "auto, chatml, or a readable file with a Jinja chat template", template
            )
        ) from error


def _end_of_turn(source: str, tokens: list[str]) -> str | None:
    """The control token that closes a turn: the last one before the generation prompt."""
    for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>"):
        if name in tokens:
            return name
    body = source.split("add_generation_prompt")[0]
    inside = [token for token in tokens if token in body]
    return max(inside, key=body.rfind) if inside else None


def require_template(model: LanguageModel) -> None:
    """Raise RecipeError where chats are to be trained on and the model has no template."""
    if not model.tokenizer.chat_template:
        raise RecipeError(
            Problem(
                "template",
                f"a chat template: {model.name} has none; say `template: chatml` (or name a file)",
                "auto",
            )
        )


def _pad_apart(network: Any, tokenizer: Any) -> None:
    """A pad token for tools that need one; lehr itself never pads with meaning.

    pad = eos stays as it is: nothing here finds the end of a text by its pad token.
    """
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    generation = getattr(network, "generation_config", None)
    if generation is not None and generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
