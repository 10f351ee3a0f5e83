"""Small recipes, rows and models that a whole run takes a second or two with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lehr.diagnosis import machine
from lehr.models.language_model import LanguageModel
from lehr.models.loading import set_template
from lehr.models.tiny import train_tokenizer
from lehr.pipeline.events import Event
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.run import run
from lehr.recipe.loading import load_recipe

COLOURS = ("red", "blue", "green", "white", "black", "grey")
THINGS = ("door", "boat", "lamp", "coat", "ring", "wall", "bird", "cake")


def chat_rows(count: int = 40) -> list[dict[str, Any]]:
    """Questions about things and their colours."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Which colour has {THINGS[n % 8]} {n}?"},
                {"role": "assistant", "content": f"It is {COLOURS[n % 6]}."},
            ]
        }
        for n in range(count)
    ]


def pair_rows(count: int = 28) -> list[dict[str, Any]]:
    """Pairs whose better answer is the shorter one."""
    return [
        {
            "prompt": f"Which colour has {THINGS[n % 8]} {n}?",
            "chosen": f"It is {COLOURS[n % 6]}.",
            "rejected": f"I can not say {COLOURS[(n + 1) % 6]}.",
        }
        for n in range(count)
    ]


def text_rows(count: int = 60) -> list[dict[str, Any]]:
    """Short documents."""
    return [
        {"text": f"The {THINGS[n % 8]} number {n} is {COLOURS[n % 6]} and stands by the road."}
        for n in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_data(folder: Path) -> None:
    """chats.jsonl, pairs.jsonl and text.jsonl."""
    write_rows(folder / "chats.jsonl", chat_rows())
    write_rows(folder / "pairs.jsonl", pair_rows())
    write_rows(folder / "text.jsonl", text_rows())


def save_base(folder: Path, template: str = "chatml", **config: Any) -> Path:
    """A tiny model with random weights as a plain transformers folder."""
    texts = [json.dumps(row) for row in (*chat_rows(), *pair_rows(), *text_rows())]
    tokenizer = train_tokenizer(texts, 400)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    settings = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(5)
    made = LlamaConfig(**{**shape, **heads, **settings, "max_position_embeddings": 512, **config})
    network = LlamaForCausalLM(made).eval()
    if template != "auto":
        set_template(network, tokenizer, template)
    LanguageModel(network, tokenizer, "base").save_full(folder)
    return folder


def lora_recipe(**changes: Any) -> dict[str, Any]:
    """sft, then preference, with one adapter over the folder `base`."""
    return {
        "model": "./base",
        "output": "out",
        "seed": 3,
        "threads": 1,
        "adapter": {"kind": "lora", "rank": 4},
        "data": {
            "chats": {"path": "chats.jsonl", "holdout": 10},
            "pairs": {"path": "pairs.jsonl", "holdout": 8},
        },
        "stages": [
            {"sft": stage("chats", learning_rate=2e-2)},
            {"preference": stage("pairs", learning_rate=5e-3)},
        ],
        "gates": {"protect": {"forgetting": 9.0}, "undetermined": "promote"},
        "export": ["adapter", "merged"],
        "show": ["Which colour has door 3?"],
        **changes,
    }


def weights_recipe(**changes: Any) -> dict[str, Any]:
    """pretrain, then sft, of all weights of a model made from scratch."""
    return {
        "model": "tiny:100k",
        "template": "chatml",
        "output": "out",
        "seed": 3,
        "threads": 1,
        "adapter": {"kind": "none"},
        "data": {
            "text": {"path": "text.jsonl", "holdout": 10},
            "chats": {"path": "chats.jsonl", "holdout": 10},
        },
        "stages": [
            {"pretrain": stage("text", learning_rate=5e-3)},
            {"sft": stage("chats", learning_rate=5e-3)},
        ],
        "gates": {"protect": {"forgetting": 9.0}},
        "export": ["merged"],
        **changes,
    }


def stage(data: Any, **keys: Any) -> dict[str, Any]:
    """The keys of a stage of six updates."""
    return {"data": data, "max_length": 64, "batch_size": 6, "max_updates": 6, **keys}


def write_recipe(folder: Path, recipe: dict[str, Any], name: str = "recipe.yaml") -> Path:
    """A recipe file (JSON is YAML)."""
    path = folder / name
    path.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return path


class Heard(list[Event]):
    """A listener that remembers."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self if event.kind == kind]

    def updates(self, folder: str = "") -> int:
        """Updates that were trained (in a stage)."""
        return sum(folder in ("", event.stage) for event in self.of("update"))


def go(
    path: Path, *overrides: str, out: Path | None = None, fresh: bool = False
) -> tuple[Ledger, Path, Heard]:
    """Run a recipe file: ledger, folder, and what was said."""
    heard = Heard()
    recipe = load_recipe(path, overrides)
    ledger = run(recipe, out=out, fresh=fresh, listeners=[heard])
    return ledger, ledger.folder, heard


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without the timings."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def losses(folder: Path) -> list[float]:
    """The losses of metrics.jsonl."""
    return [row["loss"] for row in metrics(folder)]


def weights(folder: Path) -> dict[str, bytes]:
    """Bytes of every weight file below a folder but those of caches."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
        if ".cache" not in path.parts
    }


def read(path: Path) -> Any:
    """A strict JSON file."""

    def refuse(word: str) -> None:
        raise ValueError(f"{path} holds {word}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@lru_cache(maxsize=1)
def measured_once() -> machine.Machine:
    """This machine, its speed measured once for all tests."""
    return machine.describe_machine(measure=True)
