"""Which characters of a rendered chat a model must emit, turn by turn.

An answer runs from the end of the generation prompt, as serving renders it, through
the end-of-turn token after the answer's text. Where a template does not fit all
turns into one sequence, the chat becomes one script per turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lehr.data.conversations import ChatMessage, Tools, says_something
from lehr.data.provenance import TEMPLATE
from lehr.data.rendered import OWNER_TAINTED, Rendered
from lehr.data.templates import Template, TemplateRaised
from lehr.data.tokenization import Control, TextTokenizer

NOTE_PROMPT_SPLIT = "a generation prompt is no prefix of the whole chat: one example per turn"
NOTE_HISTORY_SPLIT = (
    "the template renders an earlier answer otherwise than a last one: one example per turn"
)
NOTE_STOP_SPLIT = "the template ends no earlier answer with a stop token: one example per turn"
NOTE_EOS_ADDED = "the template ends the answer with no stop token: EOS was appended"
NOTE_JOINED = (
    "the generation prompt is no prefix of the rendered answer: trained as prompt + answer"
)
NOTE_THINK_CLOSED = "the generation prompt opens a thought that the answer does not close: closed"
NOTE_EMPTY = "an empty answer was not trained"
NOTE_NO_PROMPT = "an answer without a question before it was not trained"


@dataclass(frozen=True)
class Answer:
    """Supervised characters [start, end); `stopped`: they end with a stop token."""

    start: int
    end: int
    stopped: bool


@dataclass(frozen=True)
class Script:
    """One sequence to tokenise: a rendered chat, its control tokens, cuts and answers."""

    rendered: Rendered
    controls: list[Control]
    boundaries: tuple[int, ...]
    answers: tuple[Answer, ...]
    messages: int


class DoesNotFit(Exception):
    """The turns do not fit one sequence; the text is the note to report."""


class TurnReader:
    """Renders chats with one template, date and tokenizer, and finds their answers."""

    def __init__(self, template: Template, date: str, text: TextTokenizer, stop_ids: set[int]):
        self.template = template
        self.date = date
        self.text = text
        self.stop_ids = stop_ids
        self.end_tokens = 1
        self._probe_end_of_turn()

    def _probe_end_of_turn(self) -> None:
        """Adds the template's end-of-turn token to `stop_ids`; counts adjacent end tokens."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            rendered = self.render(chat, ())
        except TemplateRaised:
            return
        content_end = max((run.end for run in rendered.runs if run.owner == 1), default=None)
        if content_end is None:
            return
        after = [
            control
            for control in self.text.controls_in(rendered, ())
            if control.start >= content_end
            and control.id not in {self.text.controls[name] for name in self.text.markers}
        ]
        if after:
            self.stop_ids.add(after[0].id)
            self.end_tokens = 1
            for before, control in pairwise(after):
                if before.end != control.start or control.id not in self.stop_ids:
                    break
                self.end_tokens += 1

    def render(
        self, messages: Sequence[ChatMessage], tools: Tools, add_generation_prompt: bool = False
    ) -> Rendered:
        """Render with origins, checked against a rendering that knows of none."""
        rendered = self.template.render(messages, tools, add_generation_prompt, self.date)
        rendered.text.encode()  # UnicodeEncodeError at a lone surrogate, which is no text
        if rendered.text != self._text(messages, tools, add_generation_prompt):
            raise TemplateRaised("its text could not be followed to its origins")
        return rendered

    def _text(
        self, messages: Sequence[ChatMessage], tools: Tools, add_generation_prompt: bool = False
    ) -> str:
        return self.template.text(messages, tools, add_generation_prompt, self.date)

    def controls(self, rendered: Rendered, messages: Sequence[ChatMessage]) -> list[Control]:
        answers = {i for i, m in enumerate(messages) if m.get("role") == "assistant"}
        return self.text.controls_in(rendered, answers)

    def prompt_ends(
        self, rendered: Rendered, messages: Sequence[ChatMessage], tools: Tools
    ) -> dict[int, int]:
        """For each assistant message: where its generation prompt ends in `rendered`.

        A message is missing where serving would render another prompt before it.
        """
        ends: dict[int, int] = {}
        for index, message in enumerate(messages):
            if message.get("role") != "assistant" or index == 0:
                continue
            try:
                prompt = self._text(messages[:index], tools, add_generation_prompt=True)
            except TemplateRaised:
                continue
            # A prompt that reaches into the answer's text agrees with it only by chance.
            own = next((run.start for run in rendered.runs if run.owner == index), len(prompt))
            if rendered.text.startswith(prompt) and own >= len(prompt):
                ends[index] = len(prompt)
        return ends

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> Script:
        """What serving gives the model to answer `messages`."""
        rendered = self.render(messages, tools, add_generation_prompt=True)
        ends = self.prompt_ends(rendered, messages, tools)
        controls = self.controls(rendered, messages)
        return Script(rendered, controls, tuple(ends.values()), (), len(messages))

    def find_answer(
        self, rendered: Rendered, controls: Sequence[Control], index: int, start: int
    ) -> Answer | None:
        """The characters of message `index` after its prompt; None when it wrote none."""
        content_end = 0
        limit = len(rendered.text)
        for run in rendered.runs:
            if run.end <= start:
                continue
            if run.owner > index:
                limit = run.start
                break
            if run.owner in (index, OWNER_TAINTED):
                content_end = run.end
        if not content_end:
            return None
        end = 0
        tokens = 0
        for control in controls:
            if control.start < content_end or control.end > limit:
                continue
            if end and (control.start != end or tokens == self.end_tokens):
                break
            if control.id in self.stop_ids:
                end, tokens = control.end, tokens + 1
            elif end:
                break
        if end:
            return Answer(start, end, True)
        following = [c.start for c in controls if content_end <= c.start < limit]
        written = rendered.text[content_end : min([limit, *following])].rstrip()
        return Answer(start, content_end + len(written), False)

    def whole(
        self, messages: Sequence[ChatMessage], trained: Sequence[bool], tools: Tools
    ) -> tuple[Script, list[str]]:
        """The chat as one script, with notes. Raises DoesNotFit, TemplateRaised."""
        rendered = self.render(messages, tools)
        controls = self.controls(rendered, messages)
        ends = self.prompt_ends(rendered, messages, tools)
        answers: list[Answer] = []
        notes: list[str] = []
        last = len(messages) - 1
        for index in range(len(messages)):
            if not trained[index]:
                continue
            if index == 0:
                notes.append(NOTE_NO_PROMPT)
                continue
            if not says_something(messages[index]):
                notes.append(NOTE_EMPTY)
                continue
            if index not in ends:
                raise DoesNotFit(NOTE_PROMPT_SPLIT)
            answer = self.find_answer(rendered, controls, index, ends[index])
            if answer is None:
                notes.append(NOTE_EMPTY)
                continue
            if index < last:
                if not answer.stopped:
                    raise DoesNotFit(NOTE_STOP_SPLIT)
                served = self._text(messages[: index + 1], tools)
                if not served.startswith(rendered.text[answer.start : answer.end], answer.start):
                    raise DoesNotFit(NOTE_HISTORY_SPLIT)
            elif not answer.stopped:
                notes.append(NOTE_EOS_ADDED)
            answers.append(answer)
        boundaries = tuple(ends.values())
        return Script(rendered, controls, boundaries, tuple(answers), len(messages)), notes

    def joined(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[Script, list[str]]:
        """Generation prompt + last answer, for templates where one is no prefix of the other."""
        index = len(messages) - 1
        whole = self.render(messages, tools)
        prompt = self.prompt(messages[:index], tools)
        own = [run for run in whole.runs if run.owner == index]
        if not own:
            return prompt, [NOTE_EMPTY]
        # An answer that also stands before the history, or only there, is not what serving
        # lets a model write.
        own = [run for run in own if run.start >= _history_end(whole, index)]
        if not own:
            raise TemplateRaised("it renders an answer before what it answers")
        controls = self.controls(whole, messages)
        begin = _answer_begin(whole, prompt.rendered, index, own[0].start)
        answer = self.find_answer(whole, controls, index, begin)
        assert answer is not None  # its text has just been found
        text = whole.text[answer.start : answer.end]
        codes = whole.codes[answer.start : answer.end]
        notes = [NOTE_JOINED] if answer.stopped else [NOTE_JOINED, NOTE_EOS_ADDED]
        head = prompt.rendered
        if head.text.rstrip().endswith("<think>") and "</think>" not in text:
            closing = "</think>\n\n" if head.text[-1].isspace() else "\n</think>\n\n"
            text, codes = closing + text, TEMPLATE * len(closing) + codes
            notes.append(NOTE_THINK_CLOSED)
        rendered = Rendered(head.text + text, head.codes + codes)
        start, end = len(head.text), len(rendered.text)
        script = Script(
            rendered,
            self.controls(rendered, messages),
            (*prompt.boundaries, start),
            (Answer(start, end, answer.stopped),),
            len(messages),
        )
        return script, notes


def _answer_begin(whole: Rendered, prompt: Rendered, index: int, text_start: int) -> int:
    """Where the answer begins in `whole`: after what serving already gives of its header.

    What stands before the answer's text and what the generation prompt ends with are
    compared from the end of the history on. Where neither goes on as the other one, the
    header is written in two ways, and all of it is left out.
    """
    header = whole.text[_history_end(whole, index) : text_start]
    given = prompt.text[_history_end(prompt, index) :]
    pairs = enumerate(zip(header, given, strict=False))
    agreed = next((place for place, (one, other) in pairs if one != other), None)
    if agreed is None:
        agreed = min(len(header), len(given))
    if not header[agreed:].strip() or not given[agreed:].strip():
        return text_start - len(header) + agreed
    return text_start


def _history_end(rendered: Rendered, index: int) -> int:
    return max((run.end for run in rendered.runs if 0 <= run.owner < index), default=0)
