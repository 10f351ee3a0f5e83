"""`lehr chat`: a conversation with one model, or with two side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

from lehr.cli.arguments import require_text
from lehr.errors import Problem, RecipeError


def load_speakers(names: Sequence[str], template: str) -> list[tuple[str, Any, Any]]:
    """(name, model, encoder) of each; RecipeError where one has no chat template."""
    from lehr.models.loading import load_model
    from lehr.pipeline.comparing import encoder_of
    from lehr.pipeline.reopening import model_of

    speakers: list[tuple[str, Any, Any]] = []
    for spec in names:
        model = load_model(model_of(spec), template=template)
        model.eval()
        encoder = encoder_of(model)
        if encoder.template is None:
            expected = "a model with a chat template; say --template chatml for a base model"
            raise RecipeError(Problem(f"lehr chat {spec}", expected))
        speakers.append((spec, model, encoder))
    return speakers


def answer_once(
    names: Sequence[str], template: str, prompt: str, tokens: int
) -> list[tuple[str, str]]:
    """(name, answer) of each model to one prompt."""
    from lehr.evaluation.behaviour import greedy_answers

    require_text(prompt, "--prompt")
    talk = [{"role": "user", "content": prompt}]
    return [
        (name, greedy_answers(model, [talk], encoder, max_new_tokens=tokens)[0])
        for name, model, encoder in load_speakers(names, template)
    ]


def converse(names: Sequence[str], template: str, prompt: str | None, tokens: int) -> int:
    """Answer one prompt, or lines from the terminal until it ends."""
    console = Console(highlight=False)
    if prompt is not None:
        require_text(prompt, "--prompt")
    speakers = load_speakers(names, template)
    if prompt is not None:
        _answer(
            console, speakers, [[{"role": "user", "content": prompt}] for _ in speakers], tokens
        )
        return 0
    console.print("[dim]An empty line starts over, Ctrl-D leaves.[/]")
    talks: list[list[dict[str, str]]] = [[] for _ in speakers]
    while True:
        try:
            line = input("you> ")
            require_text(line, "a line")
        except EOFError:
            print(file=sys.stderr)
            return 0
        except UnicodeDecodeError:
            console.print("[dim]That was no UTF-8 text.[/]")
            continue
        except RecipeError as error:
            console.print(str(error), style="dim", markup=False)
            continue
        if not line.strip():
            talks = [[] for _ in speakers]
            console.print("[dim]a new conversation[/]")
            continue
        for talk in talks:
            talk.append({"role": "user", "content": line})
        for talk, said in zip(talks, _answer(console, speakers, talks, tokens), strict=True):
            talk.append({"role": "assistant", "content": said})


def _answer(
    console: Console, speakers: list[Any], talks: list[list[dict[str, str]]], tokens: int
) -> list[str]:
    from lehr.evaluation.behaviour import greedy_answers

    said = []
    for (_, model, encoder), talk in zip(speakers, talks, strict=True):
        said.append(greedy_answers(model, [talk], encoder, max_new_tokens=tokens)[0])
    if len(said) == 1:
        console.print(said[0], markup=False)
    else:
        width = max(20, console.width // 2 - 2)
        panels = [
            Panel(text or "(nothing)", title=name, width=width)
            for (name, _, _), text in zip(speakers, said, strict=True)
        ]
        console.print(Columns(panels))
    return said
