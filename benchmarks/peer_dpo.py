"""One timed DPO run of TRL, in its own environment: prints one JSON line.

Same pairs, same number of updates, same adapter as benchmarks.dpo_speed asks for.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="JSONL with prompt, chosen, rejected")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    pairs = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in rows
    ]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, NAMES[options.precision])
    )

    marks: list[tuple[float, float]] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        def on_log(self, _a: Any, _s: Any, _c: Any, logs: Any = None, **__: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.batch_size // options.micro_batch,
            max_steps=options.updates,
            learning_rate=1e-4,
            beta=0.1,
            bf16=options.precision == "bf16",
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            max_length=1024,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    wall = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    cpu = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"wall": wall, "cpu": cpu, "losses": losses, "peak_gib": peak}))


if __name__ == "__main__":
    main()
