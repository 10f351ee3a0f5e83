"""One timed GRPO run of TRL, in its own environment: prints one JSON line, as policy_speed asks.

The same prompts, reward, samples, new tokens and adapter; the templates' text is TRL's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """The reward of policy_speed: the share of vowels in each answer."""
    texts = [str(one[0]["content"]) for one in completions]
    return [sum(c in "aeiou" for c in text.lower()) / max(1, len(text)) for text in texts]


def time_sampling(trainer: Any) -> list[float]:
    """Seconds that each generation of a GRPO trainer takes, from now on."""
    seconds: list[float] = []
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return found

    trainer._generate = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="JSONL with a prompt of messages")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="prompts an update")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples; 0: all at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--kind", default="policy", choices=["policy"])
    parser.add_argument("--sampling", default="sequential", choices=["sequential"])
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, NAMES[options.precision])
    )
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    samples = options.batch_size * options.samples
    micro_batch = options.micro_batch or samples
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        max_steps=options.updates,
        bf16=options.precision == "bf16",
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        learning_rate=1e-5,
        beta=0.0,
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        temperature=1.0,
        shuffle_dataset=False,
        # Every sample is written to its end, so that both sides do the same work.
        generation_kwargs={"min_new_tokens": options.new_tokens},
    )
    sampled = time_sampling(GRPOTrainer)
    GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    ).train()
    wall = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    cpu = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"wall": wall, "cpu": cpu, "sampling": sampled[1:], "peak_gib": peak}))


if __name__ == "__main__":
    main()
