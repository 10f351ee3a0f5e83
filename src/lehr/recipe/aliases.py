"""Spellings of TRL / Hugging Face, Axolotl and LLaMA-Factory, and what they are here.

A table per section: their key -> our key path, with a conversion where their value
means something else. Nothing is guessed: a value whose meaning lehr does not share is
refused with the reason, and a key that lehr does not need is named in a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ForeignValueError(Exception):
    """The value of a foreign key has no equal here; the message says what was expected."""


class _Drop:
    """The foreign key asks for nothing."""


DROP = _Drop()


@dataclass(frozen=True)
class Alias:
    """Where a foreign key goes: a dotted path from its section, and how its value is read."""

    target: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


def truth(value: Any) -> bool:
    """A foreign switch: true, "true", 1 and their opposites."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    word = str(value).strip().lower()
    if word not in words:
        raise ForeignValueError("true or false")
    return words[word]


def switch(on: Any, off: Any) -> Callable[[Any], Any]:
    """true -> `on`, false -> `off`; an exception instance is raised."""

    def convert(value: Any) -> Any:
        chosen = on if truth(value) else off
        if isinstance(chosen, ForeignValueError):
            raise chosen
        return chosen

    return convert


def word_of(table: Mapping[str, Any], later: str = "") -> Callable[[Any], Any]:
    """A foreign word by table; `later` says what a word outside it means."""

    def convert(value: Any) -> Any:
        word = str(value).strip().lower()
        if word not in table:
            raise ForeignValueError("one of " + ", ".join(sorted(table)) + later)
        return table[word]

    return convert


def _max_steps(value: Any) -> Any:
    return DROP if str(value).strip() in ("-1", "0") else value


def _targets(value: Any) -> Any:
    if isinstance(value, str):
        if value.strip() in ("all", "all-linear"):
            return "all-linear"
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _zero_is_none(value: Any) -> Any:
    return None if str(value).strip() in ("0", "0.0") else value


def _zero_is_nothing(value: Any) -> Any:
    if str(value).strip() not in ("0", "0.0"):
        raise ForeignValueError("0: smoothing of the language loss is not in this version")
    return DROP


def _off(name: str) -> Callable[[Any], Any]:
    """A switch that this version does not have: false is fine, true is refused."""
    return switch(ForeignValueError(f"false: {name} is not in this version"), DROP)


def _bf16(value: Any) -> Any:
    return "auto" if str(value).lower() == "auto" else switch("bf16", "fp32")(value)


def _datasets(value: Any) -> Any:
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


NOT_LATER = "; other words are not in this version"
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
}
OPTIMIZERS = dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"
) | {"sgd": "sgd", "muon": "muon"}
PREFERENCE_LOSSES = {"dpo": "dpo", "sigmoid": "dpo"}
FORMATS = {
    "auto": "auto",
    "chat_template": "auto",
    "chat": "chat",
    "text": "text",
    "completion": "text",
    "pretrain": "text",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "messages": "chat",
    "chatml": "chat",
    "pair": "pair",
    "input_output": "completion",
}
TRAINS_ON_PROMPTS = ForeignValueError(
    "false: lehr trains on what the model must emit, never on the user's words; "
    "use a pretrain stage to train on every token"
)
TRAINS_ON_ALL = ForeignValueError(
    "true: lehr always masks what the model does not emit; "
    "use a pretrain stage to train on every token"
)

_DOUBLE = switch(DROP, ForeignValueError("true: scales of a base in four bits are in 8 bits"))
# Keys that ask for a base in four bits, and those that may say beside it that LoRA trains.
FOUR_BITS = {"load_in_4bit": ("true", "yes", "1"), "quantization_bit": ("4",)}
SAYS_LORA = {"use_peft": "true", "use_lora": "true", "finetuning_type": "lora"}

ADAPTER: Mapping[str, Alias] = {
    "lora_r": Alias("rank"),
    "lora_rank": Alias("rank"),
    "r": Alias("rank"),
    "lora_alpha": Alias("alpha"),
    "lora_dropout": Alias("dropout"),
    "lora_target": Alias("targets", _targets),
    "lora_target_modules": Alias("targets", _targets),
    "target_modules": Alias("targets", _targets),
    "lora_target_linear": Alias("targets", switch("all-linear", DROP)),
    "use_peft": Alias("kind", switch("lora", "none")),
    "use_lora": Alias("kind", switch("lora", "none")),
    "finetuning_type": Alias("kind", word_of({"lora": "lora", "full": "none"}, NOT_LATER)),
    "load_in_4bit": Alias("kind", switch("qlora", DROP)),
    "load_in_8bit": Alias("kind", _off("an 8-bit base")),
    "quantization_bit": Alias("kind", word_of({"4": "qlora", "none": DROP}, NOT_LATER)),
    "bnb_4bit_quant_type": Alias("kind", word_of({"nf4": DROP}, NOT_LATER)),
    "bnb_4bit_use_double_quant": Alias("kind", _DOUBLE),
    "use_bnb_nested_quant": Alias("kind", _DOUBLE),
    "double_quantization": Alias("kind", _DOUBLE),
    "use_dora": Alias("kind", _off("DoRA")),
    "use_rslora": Alias("kind", _off("rank-stabilised scaling")),
    "peft_use_dora": Alias("kind", _off("DoRA")),
    "peft_use_rslora": Alias("kind", _off("rank-stabilised scaling")),
}

TOP: Mapping[str, Alias] = {
    "base_model": Alias("model"),
    "model_name_or_path": Alias("model"),
    "model_name": Alias("model"),
    "output_dir": Alias("output"),
    "chat_template": Alias(
        "template", lambda value: "auto" if value == "tokenizer_default" else value
    ),
    "chat_template_path": Alias("template"),
    "chat_template_jinja": Alias("template"),
    "random_seed": Alias("seed"),
    "num_threads": Alias("threads"),
}

STAGE: Mapping[str, Alias] = {
    "num_train_epochs": Alias("epochs"),
    "num_epochs": Alias("epochs"),
    "max_steps": Alias("max_updates", _max_steps),
    "lr": Alias("learning_rate"),
    "warmup_ratio": Alias("schedule.warmup"),
    "warmup_steps": Alias("schedule.warmup"),
    "lr_scheduler_type": Alias("schedule.kind", word_of(SCHEDULES, NOT_LATER)),
    "lr_scheduler": Alias("schedule.kind", word_of(SCHEDULES, NOT_LATER)),
    "min_lr_ratio": Alias("schedule.final"),
    "cosine_min_lr_ratio": Alias("schedule.final"),
    "sequence_len": Alias("max_length"),
    "cutoff_len": Alias("max_length"),
    "max_seq_length": Alias("max_length"),
    "max_seq_len": Alias("max_length"),
    "model_max_length": Alias("max_length"),
    "sample_packing": Alias("packing", truth),
    "neat_packing": Alias("packing", truth),
    "total_batch_size": Alias("batch_size"),
    "train_batch_size": Alias("batch_size"),
    "pref_beta": Alias("beta"),
    "dpo_beta": Alias("beta"),
    "rl_beta": Alias("beta"),
    "loss_type": Alias("loss", word_of(PREFERENCE_LOSSES, NOT_LATER)),
    "pref_loss": Alias("loss", word_of(PREFERENCE_LOSSES, NOT_LATER)),
    "dpo_label_smoothing": Alias("label_smoothing"),
    "label_smoothing_factor": Alias("label_smoothing", _zero_is_nothing),
    "max_grad_norm": Alias("clip", _zero_is_none),
    "gradient_clipping": Alias("clip", _zero_is_none),
    "weight_decay": Alias("optimizer.weight_decay"),
    "adam_epsilon": Alias("optimizer.eps"),
    "optim": Alias("optimizer.kind", word_of(OPTIMIZERS, NOT_LATER)),
    "use_muon": Alias("optimizer.kind", switch("muon", DROP)),
    "eval_steps": Alias("evaluate_every"),
    "save_steps": Alias("checkpoint_every"),
    "save_total_limit": Alias("checkpoints_kept"),
    "load_best_model_at_end": Alias("promote", switch("best", "last")),
    "early_stopping_patience": Alias("early_stop"),
    "bf16": Alias("precision", _bf16),
    "fp16": Alias("precision", switch("fp16", DROP)),
    "pure_bf16": Alias("precision", switch("pure_bf16", DROP)),
    "gradient_checkpointing": Alias("recompute", switch("full", "none")),
    "dataset": Alias("data", _datasets),
    "datasets": Alias("data", _datasets),
    "dataset_name": Alias("data"),
    "dataset_path": Alias("data"),
    "train_file": Alias("data"),
}

SOURCE: Mapping[str, Alias] = {
    "val_set_size": Alias("holdout"),
    "val_size": Alias("holdout"),
    "test_size": Alias("holdout"),
    "max_samples": Alias("rows"),
    "num_samples": Alias("rows"),
    "train_on_inputs": Alias("train_on", switch(TRAINS_ON_PROMPTS, "assistant")),
    "train_on_prompt": Alias("train_on", switch(TRAINS_ON_PROMPTS, "assistant")),
    "assistant_only_loss": Alias("train_on", switch("assistant", TRAINS_ON_ALL)),
    "completion_only_loss": Alias("train_on", switch("completion", TRAINS_ON_ALL)),
    "mask_history": Alias("train_on", switch("last", DROP)),
}

# Only inside a source: too short to be understood elsewhere.
SOURCE_ONLY: Mapping[str, Alias] = {
    "type": Alias("format", word_of(FORMATS, NOT_LATER)),
    "ds_type": Alias("format", lambda value: DROP, "the container is seen from the file"),
    "split": Alias("path", word_of({"train": DROP}), "a file is one split"),
    "file": Alias("path"),
    "files": Alias("path"),
    "file_name": Alias("path"),
    "data_files": Alias("path"),
}

PER_STEP = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "per_gpu_train_batch_size",
    "device_batch_size",
)
ACCUMULATION = ("gradient_accumulation_steps", "accumulate_grad_batches")
BETAS = ("adam_beta1", "adam_beta2")

# Keys that lehr does not need, with what it does instead.
UNNEEDED: Mapping[str, str] = {
    "bnb_4bit_compute_dtype": "precision decides it",
    "logging_steps": "every update is logged",
    "logging_first_step": "every update is logged",
    "logging_dir": "the log is metrics.jsonl in the stage's folder",
    "per_device_eval_batch_size": "scores do not depend on a batch size",
    "eval_batch_size": "scores do not depend on a batch size",
    "dataloader_num_workers": "rows are encoded once and cached",
    "preprocessing_num_workers": "rows are encoded once and cached",
    "dataset_num_proc": "rows are encoded once and cached",
    "dataset_prepared_path": "the cache lives beside the run",
    "remove_unused_columns": "columns are read by their meaning",
    "overwrite_output_dir": "use lehr run --fresh to start over",
    "overwrite_cache": "the cache is keyed by everything that can change it",
    "plot_loss": "the report has the curves",
    "do_train": "a stage trains",
    "do_eval": "every stage is evaluated",
    "save_strategy": "checkpoint_every says it in updates",
    "eval_strategy": "evaluate_every says it in updates",
    "evaluation_strategy": "evaluate_every says it in updates",
    "tf32": "lehr computes in fp32 or bf16",
    "group_by_length": "packing leaves no padding",
    "pad_to_sequence_len": "packing leaves no padding",
    "flash_attention": "attention is chosen by the machine and probed",
    "flash_attn": "attention is chosen by the machine and probed",
    "attn_implementation": "attention is chosen by the machine and probed",
    "use_cache": "lehr decides it",
    "ddp_timeout": "one machine",
    "data_seed": "seed decides every random stream",
}

KINDS: Mapping[str, str] = {
    "pt": "pretrain",
    "cpt": "pretrain",
    "dpo": "preference",
}


def names_of(section: str) -> dict[str, str]:
    """Every foreign key that may stand in `section`, with our name of it."""
    tables: dict[str, tuple[tuple[str, Mapping[str, Alias]], ...]] = {
        "recipe": (("", TOP), ("adapter.", ADAPTER)),
        "stage": (("", STAGE), ("adapter.", ADAPTER)),
        "adapter": (("", ADAPTER),),
        "source": (("", SOURCE), ("", SOURCE_ONLY)),
    }
    names = {
        key: prefix + alias.target
        for prefix, table in tables.get(section, ())
        for key, alias in table.items()
    }
    if section == "stage":
        names |= {key: alias.target for key, alias in SOURCE.items()}
        names |= dict.fromkeys((*PER_STEP, *ACCUMULATION), "batch_size")
        names |= dict.fromkeys(BETAS, "optimizer.betas")
    return names


def everywhere() -> dict[str, str]:
    """Every foreign key, with a phrase for our name of it: for keys that stand astray."""
    shown = {
        "recipe": "{} (at the top level)",
        "source": "{} (of a source in data)",
        "stage": "{} (of a stage)",
    }
    names: dict[str, str] = {}
    for section, phrase in shown.items():
        for key, target in names_of(section).items():
            if len(key) > 1 and key not in names:
                names[key] = phrase.format(target)
    return names
