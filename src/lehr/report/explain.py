"""`lehr explain TOPIC`: the documentation page, with the last number measured on this machine.

Pages are Markdown files beside this module, so that they are found in an installed package.
Every page has the same five headings.
"""

from __future__ import annotations

import difflib
import json
import os
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.report.reading import mapping, parse_json, text

HEADINGS = (
    "What it is",
    "When it pays",
    "When it fails",
    "The number measured here",
    "The command that re-measures it",
)
MEASURED_HEADING = f"## {HEADINGS[3]}"
# Other words that people use for the same thing.
SYNONYMS = {
    "mask": "masks",
    "dpo": "preference",
    "cpt": "continued-pretraining",
    "pretrain": "continued-pretraining",
    "pretraining": "continued-pretraining",
    "warmup": "schedules",
    "wsd": "schedules",
    "ema": "averaging",
    "batchnorm": "batch-norm",
    "noise-scale": "batch-size",
    "spike": "guard",
    "spikes": "guard",
    "rewind": "guard",
    "quarantine": "guard",
    "gradients": "gradient-flow",
    "backpropagation": "gradient-check",
    "gradcheck": "gradient-check",
    "find-lr": "learning-rate-finder",
    "learning-rate": "learning-rate-finder",
    "momentum": "sgd",
    "fp8": "float8",
    "fp16": "loss-scale",
    "schedule": "schedules",
    "sampling": "decoding",
    "generation": "decoding",
    "top-p": "decoding",
    "temperature": "decoding",
    "gates": "evaluation",
    "gate": "evaluation",
    "flips": "evaluation",
    "over-refusal": "refusal",
    "replay": "forgetting",
    "adapter": "lora",
    "nf4": "qlora",
    "four-bits": "qlora",
    "4bit": "qlora",
    "bitsandbytes": "qlora",
    "optimizer": "adamw",
    "bf16": "precision",
    "fp32": "precision",
    "stochastic-rounding": "pure-bf16",
    "micro-batch": "accumulation",
    "cache": "stage-cache",
    "merged": "export",
    "gguf": "export",
    "template": "templates",
    "checkpoint": "checkpoints",
    "recompute": "recomputation",
    "gradient-checkpointing": "recomputation",
    "activation-checkpointing": "recomputation",
}


def topics() -> list[tuple[str, str]]:
    """(name, one line) of every page, by name."""
    found = []
    for name in sorted(_names()):
        title = _page(name).split("\n", 1)[0].removeprefix("# ")
        found.append((name, title.partition(": ")[2] or title))
    return found


def explain(topic: str) -> str:
    """The page of a topic as Markdown; what was measured here last stands under its heading.

    Raises RecipeError with the closest topics for an unknown one.

    >>> explain("dpo").splitlines()[0]
    '# preference: learning from pairs of answers (DPO)'
    """
    name = topic.strip().lower().replace("_", "-").replace(" ", "-").removesuffix(".md")
    names = _names()
    if name not in names:
        name = SYNONYMS.get(name, name)
    if name not in names:
        close = difflib.get_close_matches(name, [*names, *SYNONYMS], n=3, cutoff=0.5)
        close = list(dict.fromkeys(SYNONYMS.get(one, one) for one in close))
        hint = f"perhaps {' or '.join(close)}" if close else f"one of {', '.join(sorted(names))}"
        raise RecipeError(Problem("lehr explain", f"a topic: {hint}", topic))
    page = _page(name)
    measured = _measurements().get(name)
    if not isinstance(measured, dict) or not text(measured.get("text")):
        return page
    line = f"On this machine, {text(measured.get('date')) or 'some time ago'}: {measured['text']}"
    return page.replace(f"{MEASURED_HEADING}\n", f"{MEASURED_HEADING}\n\n{line}\n", 1)


def record_measurement(topic: str, measured: str) -> Path:
    """Keep `measured`, one line, as the last number of a topic on this machine; returns the file.

    The file is `measured.json` in $LEHR_HOME, or in ~/.cache/lehr. Raises RecipeError for an
    unknown topic.
    """
    name = SYNONYMS.get(topic, topic)
    if name not in _names():
        raise RecipeError(Problem("record_measurement", "the name of a page", topic))
    values = _measurements()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    values[name] = {"date": date, "text": " ".join(measured.split())}
    path = _measured_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    aside.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


def _names() -> set[str]:
    folder = resources.files("lehr.report") / "pages"
    return {entry.name[:-3] for entry in folder.iterdir() if entry.name.endswith(".md")}


def _page(name: str) -> str:
    return (resources.files("lehr.report") / "pages" / f"{name}.md").read_text(encoding="utf-8")


def _measured_file() -> Path:
    home = os.environ.get("LEHR_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "lehr") / "measured.json"


def _measurements() -> dict[str, Any]:
    try:
        return dict(mapping(parse_json(_measured_file().read_bytes().decode("utf-8", "replace"))))
    except OSError:
        return {}
