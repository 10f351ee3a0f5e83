"""`lehr plan DATA --model M`: a commented recipe to start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lehr.data.sources import read_source
from lehr.errors import Problem, RecipeError
from lehr.pipeline.auditing import named

STAGE_OF_KIND = {"text": "pretrain", "chat": "sft", "pair": "preference"}
ORDER = ("pretrain", "sft", "preference")
WHY = {
    "pretrain": "plain text: every token is a target; what it knew before may fade",
    "sft": "conversations: only the answers are targets",
    "preference": "pairs: the better answer becomes likelier than the worse one (DPO)",
}


def draft_recipe(paths: Sequence[Path], model: str, out: Path | None) -> tuple[str, Path]:
    """(text, where it was written). Raises RecipeError for data that no stage takes."""
    target = out or Path("recipe.yaml")
    if target.exists():
        raise RecipeError(Problem(str(target), "a new file for the recipe; choose one with --out"))
    names: dict[str, list[str]] = {}
    data: list[str] = []
    problems = []
    for name, path in named(paths).items():
        try:
            rows = read_source(name, [path])
        except RecipeError as error:
            problems += error.problems
            continue
        kind = rows.examples[0].kind
        stage = STAGE_OF_KIND.get(kind)
        if stage is None:
            expected = "text, conversations or pairs: labelled rows have no stage in this version"
            problems.append(Problem(str(path), expected, kind))
            continue
        names.setdefault(stage, []).append(name)
        data.append(
            f"  {name}: {json.dumps(str(path.absolute()), ensure_ascii=False)}"
            f"  # {len(rows.examples):,} rows, shape {rows.shape}"
        )
    if problems:
        raise RecipeError(problems)
    stages = []
    for stage in ORDER:
        if stage in names:
            sources = names[stage][0] if len(names[stage]) == 1 else f"[{', '.join(names[stage])}]"
            stages.append(f"  # {WHY[stage]}\n  - {stage}: {{data: {sources}}}")
    tiny = model.startswith("tiny:")
    lines = [
        f"# A draft by `lehr plan`; look at it with `lehr plan {target}`, start it with",
        f"# `lehr run {target}`. `lehr explain recipe` lists every key.",
        f"model: {model}",
        *(["template: chatml  # a base model has no chat template of its own"] if tiny else []),
        "output: runs/" + target.stem,
        *(["adapter: {kind: none}  # all weights of so small a model"] if tiny else []),
        "data:  # a tenth of the rows (at most 200) is held out for the gates",
        *data,
        "stages:  # each must pass its gates, or its parent is kept",
        *stages,
    ]
    text = "\n".join(lines) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return text, target
