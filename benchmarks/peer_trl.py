"""One timed SFT or DPO run of TRL, in its own environment: prints one JSON line.

Same tokens, same number of updates, same adapter as sft_speed and dpo_speed ask for: rows come
tokenized, for TRL renders a chat with a line break after its end that it trains on. Tokens that
are no padding are counted as the collator makes the micro-batches.
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
    parser.add_argument("--kind", required=True, choices=["sft", "dpo"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="JSON: rows of token ids")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--sampling", default="sequential")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(options.threads)
    rows = json.loads(Path(options.rows).read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, NAMES[options.precision])
    )

    marks: list[tuple[float, float]] = []
    losses: list[float] = []
    chosen: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        def on_log(self, _a: Any, _s: Any, _c: Any, logs: Any = None, **__: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))
                chosen.append(float(logs.get("logps/chosen", "nan")))

    # Two micro-batches an update, for both kinds.
    micro_batch = options.batch_size // 2
    same: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": options.batch_size // micro_batch,
        "max_steps": options.updates,
        "bf16": options.precision == "bf16",
        "use_cpu": options.device == "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "max_length": 1024,
        "train_sampling_strategy": options.sampling,
    }
    if options.kind == "sft":
        make = SFTTrainer
        settings = SFTConfig(
            **same, learning_rate=2e-4, completion_only_loss=True, shuffle_dataset=False
        )
        shown = rows
    else:
        make = DPOTrainer
        settings = DPOConfig(**same, learning_rate=1e-4, beta=0.1)
        # It tokenizes what it is given: something short, which is exchanged below.
        shown = [{"prompt": "a", "chosen": "b", "rejected": "c"} for _ in rows]
    trainer = make(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(shown),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    )
    if options.kind == "dpo":
        trainer.train_dataset = Dataset.from_list(rows)
    counts: list[int] = []
    collate = trainer.data_collator

    def counted(rows: Any) -> Any:
        batch = collate(rows)
        masks = [mask for name, mask in batch.items() if name.endswith("attention_mask")]
        counts.append(sum(int(mask.sum()) for mask in masks))
        return batch

    trainer.data_collator = counted
    trainer.train()
    wall = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    cpu = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    if options.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = [
        sum(counts[at : at + options.batch_size // micro_batch])
        for at in range(0, len(counts), options.batch_size // micro_batch)
    ]
    found = {"wall": wall, "cpu": cpu, "losses": losses, "peak_gib": peak}
    first = losses[0]
    if options.kind == "dpo":
        asked = rows[: options.batch_size]
        first = chosen[0] * len(asked) / sum(len(row["chosen_ids"]) for row in asked)
    found["first"] = first
    print(json.dumps({**found, "tokens": tokens[1 : len(wall) + 1]}))


if __name__ == "__main__":
    main()
