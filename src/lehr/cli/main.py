"""The command line: one thin function per verb; the only place that prints.

Nothing heavy is imported before a verb runs, so that `lehr --help` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from lehr import signals
from lehr.cli.arguments import Device, about_a_name, require_arguments
from lehr.cli.doctor_options import refuse_mixed
from lehr.cli.saying import wrapped
from lehr.errors import Interrupted, LehrError, OutOfResources, Problem, RecipeError

app = typer.Typer(
    name="lehr",
    help="make for post-training: from a language model to a checked assistant on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, prose on stderr.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key: --set stages.0.sft.epochs=2")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run (else the recipe's).")]


def _version(asked: bool) -> None:
    if asked:
        import lehr

        print(f"lehr {lehr.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """make for post-training: from a language model to a checked assistant on one machine."""


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, for example examples/demo.yaml")],
    overrides: Overrides = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Re-check hashes and exports of a finished run.")
    ] = False,
    as_json: Json = False,
) -> int:
    """The main job: all stages, gates, report. Resumes or reuses what is unchanged."""
    from lehr.cli.verbs import run_verb

    return run_verb(recipe, overrides or [], out, fresh=fresh, verify=verify, as_json=as_json)


@app.command()
def plan(
    recipe: Annotated[list[Path], typer.Argument(help="A recipe, or data files with --model.")],
    model: Annotated[str | None, typer.Option("--model", help="With data: the model.")] = None,
    overrides: Overrides = None,
    out: Out = None,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Range of the first gradients, fp16 and bf16 limits.")
    ] = False,
    gradcheck: Annotated[
        bool, typer.Option("--gradcheck", help="Compare gradients with float64 and differences.")
    ] = False,
    find_lr: Annotated[
        bool, typer.Option("--find-lr", help="Range test of the first stage's learning rate.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Limit of the device that trains, as in 24GiB.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option("--tflops", help="Its products' rate; for a model folder without weights."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Strategy, memory, time, masks, power of the gates; trains nothing.

    With data files instead of a recipe it writes a commented recipe to start from.
    """
    from lehr.cli.verbs import plan_verb

    checks = {"gradcheck": gradcheck, "find_lr": find_lr, "numerics": numerics}
    device = Device.of(memory, tflops)
    return plan_verb(recipe, model, overrides or [], out, checks, device, as_json=as_json)


@app.command()
def audit(
    data: Annotated[list[Path], typer.Argument(help="Data files.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Show exactly which tokens it would train.")
    ] = None,
    template: Annotated[str, typer.Option("--template", help="auto, chatml or a file.")] = "auto",
    clean: Annotated[
        Path | None, typer.Option("--clean", help="Write the rows without their faults here.")
    ] = None,
    as_json: Json = False,
) -> int:
    """What is wrong with the data, and exactly which tokens would be trained."""
    from lehr.cli.verbs import audit_verb

    return audit_verb(data, model, template, clean, as_json=as_json)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model: name, folder, .gguf or a run's folder.")],
    against: Annotated[str | None, typer.Option("--against", help="The base to compare.")] = None,
    suites: Annotated[str | None, typer.Option("--suites", help="a,b (default: all)")] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Also measure the loss on these files.")
    ] = None,
    template: Annotated[str, typer.Option("--template", help="auto, chatml or a file.")] = "auto",
    items: Annotated[int, typer.Option("--items", help="Items per suite at most.", min=2)] = 200,
    as_json: Json = False,
) -> int:
    """Scores, paired differences, flips and gates of one model against another."""
    from lehr.cli.verbs import evaluate_verb

    names = [name.strip() for name in suites.split(",")] if suites else None
    return evaluate_verb(model, against, names, data or [], template, items, as_json=as_json)


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    to: Annotated[
        str, typer.Option("--to", help="adapter,merged,fp8; gguf comes later")
    ] = "merged",
    as_json: Json = False,
) -> int:
    """Write the promoted model for other tools, with a parity check."""
    from lehr.cli.verbs import export_verb

    return export_verb(run_folder, [kind.strip() for kind in to.split(",")], as_json=as_json)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A model, or the folder of a run.")],
    against: Annotated[str | None, typer.Option("--against", help="Answer side by side.")] = None,
    template: Annotated[str, typer.Option("--template", help="auto, chatml or a file.")] = "auto",
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer once and end.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Longest answer.", min=1)] = 200,
    as_json: Json = False,
) -> int:
    """Talk to a model."""
    from lehr.cli.verbs import chat_verb

    return chat_verb(model, against, template, prompt, tokens, as_json=as_json)


@app.command()
def explain(
    topic: Annotated[str | None, typer.Argument(help="Without one: the list.")] = None,
    as_json: Json = False,
) -> int:
    """What a technique is, when it pays, when it fails, the number measured here."""
    from lehr.cli.verbs import explain_verb

    return explain_verb(topic, as_json=as_json)


@app.command()
def doctor(
    curve: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_FILE", help="A run, a log, a CSV, a recipe; - for stdin."),
    ],
    loss: Annotated[str | None, typer.Option("--loss", help="Column that is the loss.")] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary", help="Number of tokens V: the loss of guessing is ln V.", min=2
        ),
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option("--accumulation", help="Micro-batches in one update.", min=1)
    ] = None,
    unigram: Annotated[
        float | None,
        typer.Option(
            "--unigram-entropy", help="Entropy of the tokens' frequencies, in nats.", min=0
        ),
    ] = None,
    spike: Annotated[
        int | None,
        typer.Option("--spike", help="What made update N of a run jump: data or state?", min=1),
    ] = None,
    run_tests: Annotated[
        bool,
        typer.Option("--run-tests", help="Perform the decisive tests; a recipe: the general ones."),
    ] = False,
    stage: Annotated[str, typer.Option("--stage", help="Only this stage of a run.")] = "",
    from_start: Annotated[
        bool, typer.Option("--from-start", help="With --spike: without an older checkpoint.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Of a recipe: what does this machine wait for?")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="With --speed: write the profile here (JSON).")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """What is wrong with this curve: findings, causes, the test that decides, the remedy.

    With --speed and a recipe: where the time of an update goes, and what would make it faster.
    """
    given = {
        "--spike": spike is not None, "--run-tests": run_tests, "--speed": speed,
        "--stage": bool(stage), "--from-start": from_start, "--trace": trace is not None,
        "--set": bool(overrides), "--loss": loss is not None,
        "--vocabulary": vocabulary is not None, "--accumulation": accumulation is not None,
        "--unigram-entropy": unigram is not None,
    }  # fmt: skip
    refuse_mixed(name for name, present in given.items() if present)
    if speed:
        from lehr.cli.speed import speed_verb

        return speed_verb(curve, overrides or [], None, trace, as_json=as_json)
    if spike is not None:
        from lehr.cli.spike import spike_verb

        return spike_verb(curve, spike, stage, from_start, as_json=as_json)
    if run_tests:
        from lehr.cli.deciding import run_tests_verb

        return run_tests_verb(curve, stage, as_json=as_json)
    from lehr.cli.doctor import doctor_verb

    known = {"vocabulary": vocabulary, "accumulation": accumulation, "unigram_entropy": unigram}
    return doctor_verb(curve, loss, known, as_json=as_json)


@app.command()
def fetch(
    name: Annotated[str | None, typer.Argument(help="Without one: the list.")] = None,
    as_json: Json = False,
) -> int:
    """Get an example model, once."""
    from lehr.cli.verbs import fetch_verb

    return fetch_verb(name, as_json=as_json)


@app.command()
def demo(
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
    as_json: Json = False,
) -> int:
    """The main job on a small synthetic world, from scratch, in minutes."""
    from lehr.cli.verbs import demo_verb

    return demo_verb(out, fresh=fresh, as_json=as_json)


def _later(verb: str, what: str) -> None:
    def command(
        _arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    ) -> None:
        raise RecipeError(
            Problem(f"lehr {verb}", f"{what} is not in this version of lehr", says=True)
        )

    command.__doc__ = f"({what}: not in this version.)"
    app.command(
        name=verb, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )(command)


_later("serve", "The OpenAI-compatible endpoint")
_later("lab", "The lab of experiments")


def report_error(error: LehrError, as_json: bool) -> int:
    """Print an error for people (stderr) or programs (stdout); return the exit status."""
    signals.deaf()
    if as_json:
        print(json.dumps(error.as_json(), ensure_ascii=False, allow_nan=False))
    if error.exit_status == 2 and len(error.problems) > 1:
        print(f"{len(error.problems)} problems:", file=sys.stderr)
    for problem in error.problems:
        print(wrapped(str(problem)), file=sys.stderr)
    return error.exit_status


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lehr`; ends the process with the statuses of DESIGN §4.1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # What libraries will change one day is for developers, not for who trains a model.
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind)
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a sign that a terminal cannot show ends nothing
            stream.reconfigure(errors="replace")
    status = _run(arguments, as_json)
    signals.deaf()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _run(arguments: list[str], as_json: bool) -> int:
    try:
        signals.working()
        require_arguments(arguments)
        result: Any = app(args=arguments, standalone_mode=False, prog_name="lehr")
        if result == Interrupted.exit_status:  # the parser swallowed a Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except LehrError as error:
        return report_error(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(arguments, as_json)
    except MemoryError:
        problem = Problem(where="memory", expected="more memory than this machine could give")
        return report_error(OutOfResources(problem), as_json)
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = Problem(
                where=str(error.filename or "disk"), expected="free space on the disk"
            )
            return report_error(OutOfResources(problem), as_json)
        told = about_a_name(error)
        return _bug(error, arguments, as_json) if told is None else report_error(told, as_json)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the command line parser
            return _usage(error, as_json)
        return _bug(error, arguments, as_json)


def _interrupted(arguments: list[str], as_json: bool) -> int:
    signals.deaf()
    print(file=sys.stderr)
    told = signals.expected(arguments)
    return report_error(Interrupted(Problem("interrupted", told)), as_json)


def _usage(error: Any, as_json: bool) -> int:
    if as_json:
        problem = Problem("command line", error.format_message(), says=True)
        return report_error(RecipeError(problem), as_json)
    if error.ctx is not None:
        print(wrapped(error.ctx.get_usage(), begin=""), file=sys.stderr)
        print(f"Try '{error.ctx.command_path} --help' for help.\n", file=sys.stderr)
    print(wrapped(f"Error: {error.format_message()}", begin=""), file=sys.stderr)
    return RecipeError.exit_status


def _bug(error: BaseException, arguments: list[str], as_json: bool) -> int:
    if signals.seen():  # a library turned the signal into an error of its own
        return _interrupted(arguments, as_json)
    if as_json:
        problem = Problem("lehr", "no bug: please report it", f"{type(error).__name__}: {error}")
        value = {"error": {"kind": "bug", "problems": [problem.as_json()]}}
        print(json.dumps(value, ensure_ascii=False))
    traceback.print_exception(error, file=sys.stderr)
    print("\nThis is a bug in lehr: please report it with the lines above.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
