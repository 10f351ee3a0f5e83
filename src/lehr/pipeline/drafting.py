"""`lehr plan DATA --model M`: a commented recipe to start from."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from lehr.data.sources import read_source
from lehr.errors import Problem, RecipeError
from lehr.models.fetch import KNOWN
from lehr.pipeline.auditing import named
from lehr.pipeline.new_files import require_new, write_new

STAGE_OF_KIND = {"text": "pretrain", "chat": "sft", "pair": "preference"}
ORDER = ("pretrain", "sft", "preference")
NEW_RECIPE = "a new file for the recipe; choose one with --out"
WHY = {
    "pretrain": "plain text: every token is a target; what it knew before may fade",
    "sft": "conversations: only the answers are targets",
    "preference": "pairs: the better answer becomes likelier than the worse one (DPO)",
}


def draft_recipe(paths: Sequence[Path], model: str, out: Path | None) -> tuple[str, Path]:
    """(text, where it was written). Raises RecipeError for data that no stage takes."""
    target = out or Path("recipe.yaml")
    require_new(target, NEW_RECIPE)
    names: dict[str, list[str]] = {}
    data = CommentedMap()
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
        data[name] = str(path.absolute())
        data.yaml_add_eol_comment(f"{len(rows.examples):,} rows, shape {rows.shape}", name)
    if problems:
        raise RecipeError(problems)
    text = _dumped(_recipe(model, target, data, names), _header(target))
    write_new(target, text, NEW_RECIPE)
    return text, target


def _recipe(
    model: str, target: Path, data: CommentedMap, names: dict[str, list[str]]
) -> CommentedMap:
    """The recipe with its comments. Names and paths may hold anything that YAML gives a sense."""
    tiny = model.startswith("tiny:")
    recipe = CommentedMap(model=_model_from(model, target))
    if tiny:
        recipe["template"] = "chatml"
        recipe.yaml_add_eol_comment("a base model has no chat template of its own", "template")
    recipe["output"] = f"runs/{target.stem}"
    if tiny:
        recipe["adapter"] = _flow(kind="none")
        recipe.yaml_add_eol_comment("all weights of so small a model", "adapter")
    recipe["data"] = data
    held = "a tenth of the rows (at most 200) of each source is held out for the gates"
    recipe.yaml_set_comment_before_after_key("data", before=held)
    stages = CommentedSeq()
    for stage in ORDER:
        if stage in names:
            listed: Any = names[stage][0]
            if len(names[stage]) > 1:
                listed = CommentedSeq(names[stage])
                listed.fa.set_flow_style()
            place = len(stages)
            stages.append(CommentedMap({stage: _flow(data=listed)}))
            stages.yaml_set_comment_before_after_key(place, before=WHY[stage], indent=2)
    recipe["stages"] = stages
    kept = "each must pass its gates, or its parent is kept"
    recipe.yaml_set_comment_before_after_key("stages", before=kept)
    return recipe


def _flow(**keys: Any) -> CommentedMap:
    made = CommentedMap(keys)
    made.fa.set_flow_style()
    return made


def _model_from(model: str, target: Path) -> str:
    """The model as the recipe must name it: relative paths in a recipe start at its folder."""
    here = Path(model).expanduser()
    if model.startswith("tiny:") or model in KNOWN or here.is_absolute():
        return model
    try:
        here.stat()
    except (OSError, ValueError):  # nothing here, or no name that a file can have
        return model
    elsewhere = target.absolute().parent.resolve() != Path.cwd().resolve()
    return str(here.absolute()) if elsewhere else model


def _header(target: Path) -> str:
    name = shlex.quote(str(target)) if str(target).isprintable() else "THIS_FILE"
    return (
        f"# A draft by `lehr plan`; look at it with `lehr plan {name}`, start it with\n"
        f"# `lehr run {name}`. `lehr explain recipe` says how one is written.\n"
    )


def _words(recipe: CommentedMap) -> list[str]:
    return [recipe["model"], recipe["output"], *recipe["data"], *recipe["data"].values()]


def _dumped(recipe: CommentedMap, header: str) -> str:
    yaml = YAML()
    # Signs that end a line, or that no editor shows, are written as escapes.
    yaml.allow_unicode = all(word.isprintable() for word in _words(recipe))
    yaml.width = 1 << 20  # a line break would be a space in a path
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(recipe, stream)
    return header + stream.getvalue()
