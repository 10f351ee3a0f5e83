"""The doctor afterwards: curves of files, of a run's stages, of another trainer's folder.

Nothing here needs more than the files: `lehr doctor FILE` answers in about a second.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lehr.diagnosis.doctor import Diagnosis, Finding, diagnose
from lehr.diagnosis.doctor_curve import Curve
from lehr.diagnosis.doctor_look import Context
from lehr.diagnosis.doctor_readers import read_curve
from lehr.errors import Problem, RecipeError
from lehr.pipeline.curve_lines import read_own_curve
from lehr.pipeline.files import read_json, read_lines

# What lehr's own stages cannot have: masks and shifts are proven by the admission probe, an
# update's loss is divided by its own weight, a resume has the same bits, evaluation runs in eval
# mode. A training loss over several sources beside one source's held-out loss looks like these.
RULED_OUT = frozenset(
    {"too_low_too_soon", "scales_with_accumulation", "jump_at_resume", "eval_below_train"}
)
OF_A_RECIPE = (
    "a recipe has no curve. `lehr doctor {path} --speed` says what this machine waits for, "
    "`lehr doctor {path} --run-tests` looks for faults before the run; of a run say its folder"
)
RECORD = "doctor.json"  # what the live doctor leaves in a stage's folder


def examine(path: Path, loss: str | None = None, context: Context | None = None) -> Diagnosis:
    """`lehr doctor RUN_OR_FILE`: the stages of a run's folder, or one curve.

    Raises RecipeError for what holds no curve.
    """
    if path.suffix in (".yaml", ".yml"):
        raise RecipeError(Problem(str(path), OF_A_RECIPE.format(path=path), says=True))
    if not path.is_dir():
        return _judged(_curve(path, loss), context, path)
    places = _curves_in(path)
    if not places:
        expected = "a run's folder (with metrics.jsonl in its stages), or a file with a curve"
        raise RecipeError(Problem(str(path), expected))
    findings: list[Finding] = []
    notes: list[str] = []
    points = 0
    missing: dict[str, None] = {}  # as a set that keeps its order
    for place in places:
        stage = place.parent.name if len(places) > 1 or place.parent != path else ""
        try:
            curve = _curve(place, loss)
        except RecipeError as error:
            notes += [f"{stage}: {problem.expected}" for problem in error.problems]
            continue
        one = _judged(curve, context or _recorded(place.parent), place, stage)
        findings += one.findings
        notes += [f"{stage}: {note}" if stage else note for note in one.notes]
        points += one.points
        missing |= dict.fromkeys(one.missing)
    if len(notes) >= len(places) and not points and not findings:
        raise RecipeError([Problem(str(path), note) for note in notes])
    return Diagnosis(tuple(findings), tuple(notes), points, tuple(missing))


def _own(path: Path) -> bool:
    """Whether a stage of lehr wrote the curve: a record of the live doctor lies beside it."""
    return path.name == "metrics.jsonl" and (path.parent / RECORD).is_file()


def _curve(path: Path, loss: str | None) -> Curve:
    return read_own_curve(path, loss) if _own(path) else read_curve(path, loss)


def _judged(curve: Curve, context: Context | None, path: Path, stage: str = "") -> Diagnosis:
    """Of a curve in a file."""
    found = diagnose(curve, context, stage)
    return of_lehr(found) if _own(path) else found


def of_lehr(diagnosis: Diagnosis) -> Diagnosis:
    """Without what a stage of lehr cannot have."""
    kept = tuple(one for one in diagnosis.findings if one.name not in RULED_OUT)
    return replace(diagnosis, findings=kept)


def _curves_in(folder: Path) -> list[Path]:
    """Files of curves in a folder: a lehr run's, a lehr stage's, a HF Trainer's."""
    own = [folder / name for name in ("metrics.jsonl", "trainer_state.json")]
    here = [path for path in own if path.is_file()]
    if here:
        return here[:1]
    stages = sorted(path for path in folder.glob("[0-9][0-9]-*/metrics.jsonl") if path.is_file())
    if stages:
        return stages
    saved = [path for path in folder.glob("checkpoint-*/trainer_state.json") if path.is_file()]
    return sorted(saved, key=lambda path: path.stat().st_mtime)[-1:]  # the last holds all before


def _recorded(folder: Path) -> Context:
    """The context that a stage left, with the resumes that events.jsonl names."""
    recorded = read_json(folder / RECORD)
    known = recorded.get("context") if isinstance(recorded, dict) else None
    known = known if isinstance(known, dict) else {}
    fields = {name: known[name] for name in Context.__dataclass_fields__ if name in known}
    fields["resumes"] = tuple(fields.get("resumes") or ())
    for row in read_lines(folder.parent / "events.jsonl"):
        same = row.get("kind") == "resumed" and row.get("stage") == folder.name
        if same and isinstance(row.get("update"), int | float):
            fields["resumes"] = tuple(sorted({*fields["resumes"], float(row["update"])}))
    with suppress(TypeError, ValueError):
        return Context(**fields)
    return Context()
