"""Keys of TRL / Hugging Face, Axolotl and LLaMA-Factory: what they become, and the notice."""

from __future__ import annotations

import pytest

from lehr.recipe.loading import loads, recipe_notices


def stage_of(text, folder, **options):
    return loads(text, folder, **options).stages[0]


STAGE = {
    "num_train_epochs: 3": ("epochs", 3.0),
    "num_epochs: 2": ("epochs", 2.0),
    "max_steps: 40": ("max_updates", 40),
    "lr: 3e-4": ("learning_rate", 3e-4),
    "learning_rate: 3e-4": ("learning_rate", 3e-4),
    "warmup_ratio: 0.1": ("schedule.warmup", 0.1),
    "warmup_steps: 7": ("schedule.warmup", 7.0),
    "lr_scheduler_type: linear": ("schedule.kind", "linear"),
    "lr_scheduler: warmup_stable_decay": ("schedule.kind", "wsd"),
    "lr_scheduler_type: constant_with_warmup": ("schedule.kind", "constant"),
    "cosine_min_lr_ratio: 0.2": ("schedule.final", 0.2),
    "sequence_len: 512": ("max_length", 512),
    "cutoff_len: 512": ("max_length", 512),
    "max_seq_length: 512": ("max_length", 512),
    "sample_packing: false": ("packing", False),
    "neat_packing: true": ("packing", True),
    "per_device_train_batch_size: 4": ("batch_size", 4),
    "per_device_train_batch_size: 4, gradient_accumulation_steps: 8": ("batch_size", 32),
    "micro_batch_size: 2, gradient_accumulation_steps: 4": ("batch_size", 8),
    "max_grad_norm: 0.3": ("clip", 0.3),
    "max_grad_norm: 0": ("clip", None),
    "weight_decay: 0.01": ("optimizer.weight_decay", 0.01),
    "adam_beta1: 0.8": ("optimizer.betas", (0.8, 0.95)),
    "adam_beta1: 0.8, adam_beta2: 0.9": ("optimizer.betas", (0.8, 0.9)),
    "adam_epsilon: 1e-6": ("optimizer.eps", 1e-6),
    "optim: adamw_torch": ("optimizer.kind", "adamw"),
    "optimizer: adamw_torch_fused": ("optimizer.kind", "adamw"),
    "optim: sgd": ("optimizer.kind", "sgd"),
    "use_muon: true": ("optimizer.kind", "muon"),
    "eval_steps: 5": ("evaluate_every", 5),
    "save_steps: 6": ("checkpoint_every", 6),
    "save_total_limit: 1": ("checkpoints_kept", 1),
    "load_best_model_at_end: true": ("promote", "best"),
    "early_stopping_patience: 3": ("early_stop", 3),
    "bf16: true": ("precision", "bf16"),
    "bf16: auto": ("precision", "auto"),
    "bf16: false": ("precision", "fp32"),
    "fp16: false": ("precision", "auto"),
    "fp16: true": ("precision", "fp16"),
    "pure_bf16: true": ("precision", "pure_bf16"),
    "gradient_checkpointing: true": ("recompute", "full"),
    "gradient_checkpointing: false": ("recompute", "none"),
    "lora_r: 4": ("adapter.rank", 4),
    "lora_rank: 4": ("adapter.rank", 4),
    "adapter: {lora_r: 4}": ("adapter.rank", 4),
    "adapter: {r: 4}": ("adapter.rank", 4),
    "lora_alpha: 64": ("adapter.alpha", 64.0),
    "lora_dropout: 0.05": ("adapter.dropout", 0.05),
    "lora_target: all": ("adapter.targets", "all-linear"),
    'lora_target: "q_proj, v_proj"': ("adapter.targets", ["q_proj", "v_proj"]),
    "lora_target_modules: [q_proj]": ("adapter.targets", ["q_proj"]),
    "use_peft: false": ("adapter.kind", "none"),
    "finetuning_type: full": ("adapter.kind", "none"),
    "load_in_4bit: false": ("adapter.kind", "lora"),
    "load_in_4bit: true": ("adapter.kind", "qlora"),
    "quantization_bit: 4": ("adapter.kind", "qlora"),
    "use_peft: true, load_in_4bit: true": ("adapter.kind", "qlora"),
    "finetuning_type: lora, quantization_bit: 4": ("adapter.kind", "qlora"),
    "bnb_4bit_quant_type: nf4, load_in_4bit: true": ("adapter.kind", "qlora"),
    "double_quantization: true": ("adapter.kind", "lora"),
    "loss_type: chunked_nll": ("learning_rate", 2e-4),
}
REAL_KEYS = ("learning_rate: 3e-4", "loss_type: chunked_nll")


@pytest.mark.parametrize("keys", STAGE)
@pytest.mark.parametrize("where", ["stage", "top"])
def test_a_foreign_key_in_a_stage_and_at_the_top(keys, where, sft, folder):
    if where == "top":
        if keys.startswith(("adapter", "optimizer", "learning_rate")):
            pytest.skip("our own keys have their own place")
        text = sft(top=keys.replace(", ", "\n") if "q_proj, v" not in keys else keys)
    else:
        text = sft(keys)
    recipe = loads(text, folder)
    target, expected = STAGE[keys]
    found = recipe.stages[0]
    for part in target.split("."):
        found = getattr(found, part)
    assert found == expected and type(found) is type(expected)
    if keys not in REAL_KEYS and not keys.startswith("optimizer"):
        key = keys.split(": {")[-1].split(":")[0]
        assert any(key in notice for notice in recipe_notices(recipe))


def test_notices_say_where_and_what(sft, folder):
    text = sft("per_device_train_batch_size: 4, gradient_accumulation_steps: 8, cutoff_len: 64")
    assert recipe_notices(loads(text, folder, name="r.yaml")) == [
        "r.yaml:7 stages.0.sft.per_device_train_batch_size: per_device_train_batch_size 4 x "
        "gradient_accumulation_steps 8 is read as batch_size: 32",
        "r.yaml:7 stages.0.sft.cutoff_len: cutoff_len is read as max_length: 64",
        "r.yaml:5 data.web: is used by no stage and no gate",
    ]


def test_keys_of_the_top(folder):
    text = (
        "base_model: m\noutput_dir: out\nchat_template: chatml\nrandom_seed: 5\n"
        "lora_r: 4\nlora_alpha: 4\nstages: [sft: {dataset: chats.jsonl}]"
    )
    recipe = loads(text, folder)
    assert (recipe.model, recipe.output, recipe.template) == ("m", "out", "chatml")
    assert (recipe.seed, recipe.adapter.rank, recipe.adapter.alpha) == (5, 4, 4)


DATA = {
    "val_set_size: 0.1": ("holdout", 0.1),
    "val_size: 50": ("holdout", 50),
    "max_samples: 1000": ("rows", 1000),
    "train_on_inputs: false": ("train_on", "assistant"),
    "train_on_prompt: false": ("train_on", "assistant"),
    "assistant_only_loss: true": ("train_on", "assistant"),
    "completion_only_loss: true": ("train_on", "completion"),
    "mask_history: true": ("train_on", "last"),
    "mask_history: false": ("train_on", "assistant"),
}


@pytest.mark.parametrize("keys", DATA)
@pytest.mark.parametrize("where", ["source", "stage", "top"])
def test_keys_of_data_reach_the_sources(keys, where, sft, folder):
    text = {
        "source": sft(source=f"{{path: chats.jsonl, {keys}}}"),
        "stage": sft(keys),
        "top": sft(top=keys),
    }[where]
    recipe = loads(text, folder)
    name, expected = DATA[keys]
    assert getattr(recipe.data["chats"], name) == expected
    untouched = getattr(recipe.data["web"], name)
    assert where == "top" or untouched in (None, "assistant")


REFUSED = {
    "train_on_inputs: true": "lehr trains on what the model must emit",
    "train_on_prompt: true": "use a pretrain stage",
    "assistant_only_loss: false": "lehr always masks what the model does not emit",
    "load_in_8bit: true": "an 8-bit base is not in this version",
    "quantization_bit: 8": "other words are not in this version (found 8)",
    "bnb_4bit_quant_type: fp4": "one of nf4",
    "use_bnb_nested_quant: false": "scales of a base in four bits are in 8 bits",
    "use_dora: true": "DoRA is not in this version",
    "lr_scheduler_type: polynomial": "other words are not in this version (found 'polynomial')",
    "optim: adafactor": "not in this version (found 'adafactor')",
    "finetuning_type: freeze": "one of full, lora",
    "label_smoothing_factor: 0.1": "smoothing of the language loss is not in this version",
    "bf16: sometimes": "true or false (found 'sometimes')",
    "report_to: wandb": "none; trackers are not in this version",
    "gradient_accumulation_steps: 4": "accumulation alone does not say it",
    "per_device_train_batch_size: 1.5": "a whole number, at least 1 (found 1.5)",
    "per_device_train_batch_size: true": "a whole number, at least 1 (found True)",
    "per_device_train_batch_size: 2, micro_batch_size: 2": "one of per_device_train_batch_size",
    "pref_beta: 0.1": "beta belongs to preference stages only",
    "eval_steps: 0.05": "evaluate_every: a whole number",
    "num_train_epochs: -1": "a number above 0 or none (found -1)",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_values_that_have_no_equal_here(keys, sft, problems_of):
    problems = problems_of(sft(keys))
    assert len(problems) == 1
    if keys != "eval_steps: 0.05":
        assert REFUSED[keys] in problems[0]
    assert problems[0].startswith(f"r.yaml:7 stages.0.sft.{keys.split(':')[0]}: ")


CONFLICTS = {
    "num_train_epochs: 3, epochs: 1": "stages.0.sft.epochs is already given (line 7: 1)",
    "num_train_epochs: 3, num_epochs: 1": "already given as num_train_epochs (line 7: 3)",
    "batch_size: 4, per_device_train_batch_size: 2": "stages.0.sft.batch_size is already given",
    "lora_r: 4, adapter: {rank: 8}": "stages.0.sft.adapter.rank is already given",
    "schedule: {warmup: 0.1}, warmup_steps: 5": "stages.0.sft.schedule.warmup is already given",
    "adam_beta1: 0.8, optimizer: {betas: [0.9, 0.9]}": "stages.0.sft.optimizer.betas",
    "dataset: web": "stages.0.sft.data is already given",
}


@pytest.mark.parametrize("keys", CONFLICTS)
def test_two_values_for_one_thing(keys, sft, problems_of):
    (problem,) = problems_of(sft(keys))
    assert CONFLICTS[keys] in problem


@pytest.mark.parametrize(
    "keys",
    [
        "num_train_epochs: 3, epochs: 3.0",
        "batch_size: 8, per_device_train_batch_size: 2, gradient_accumulation_steps: 4",
        "lr: 1e-4, learning_rate: 0.0001",
        "warmup_steps: 5, schedule: {warmup: 5}",
        "max_steps: -1, epochs: 1",
        "gradient_accumulation_steps: 4, batch_size: 8",
    ],
)
def test_the_same_value_twice_is_fine(keys, sft, problems_of):
    assert problems_of(sft(keys)) == []


def test_conflict_between_sources_and_stage(sft, problems_of):
    text = sft("val_set_size: 10", source="{path: chats.jsonl, holdout: 20}")
    (problem,) = problems_of(text)
    assert problem.startswith(
        "r.yaml:7 stages.0.sft.val_set_size: the same as r.yaml:4 data.chats."
    )


def test_a_training_key_at_the_top_of_several_stages_is_refused(full, problems_of):
    (problem,) = problems_of(full + "num_train_epochs: 3\n")
    assert "num_train_epochs (epochs here) belongs in a stage: stages.0.pretrain" in problem


def test_keys_that_are_not_needed_are_named(sft, folder):
    notices = recipe_notices(loads(sft("logging_steps: 10"), folder))
    assert any("logging_steps: not needed: every update is logged" in line for line in notices)


def test_an_axolotl_file(folder):
    text = """\
base_model: HuggingFaceTB/SmolLM2-135M
datasets:
  - path: chats.jsonl
    type: chat_template
    ds_type: json
val_set_size: 0.05
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
weight_decay: 0.0
logging_steps: 1
output_dir: ./outputs/lora-out
"""
    recipe = loads(text, folder)
    (stage,) = recipe.stages
    assert stage.kind == "sft" and stage.data == {"chats": 1.0}
    assert recipe.data["chats"].format == "auto" and recipe.data["chats"].holdout == 0.05
    assert (stage.batch_size, stage.max_length, stage.epochs) == (8, 2048, 1.0)
    assert (recipe.adapter.rank, recipe.adapter.alpha) == (32, 16)
    assert stage.schedule.warmup == 10 and stage.recompute == "full"
    assert any("read as one sft stage" in notice for notice in recipe_notices(recipe))


def test_a_llama_factory_file(folder):
    text = """\
model_name_or_path: meta-llama/Llama-3.2-1B
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid
dataset: pairs.jsonl
template: chatml
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
    recipe = loads(text, folder)
    (stage,) = recipe.stages
    assert (stage.kind, stage.loss, stage.beta, stage.batch_size) == ("preference", "dpo", 0.1, 8)
    assert (stage.learning_rate, stage.epochs, stage.precision) == (5e-6, 3.0, "bf16")
    assert recipe.data["pairs"].rows == 1000 and recipe.template == "chatml"


def test_a_trl_file(folder):
    text = """\
model_name_or_path: m
dataset_name: chats.jsonl
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
report_to: none
completion_only_loss: true
"""
    recipe = loads(text, folder)
    (stage,) = recipe.stages
    assert stage.batch_size == 16 and stage.evaluate_every == 100
    assert recipe.data["chats"].train_on == "completion"


def test_a_flat_file_of_a_stage_that_comes_later(problems_of):
    problems = problems_of("model: m\nstage: rm\ndataset: pairs.jsonl\nlearning_rate: 1e-4")
    assert any("r.yaml:2 stage: one of pretrain, sft, preference; rm is not" in p for p in problems)
