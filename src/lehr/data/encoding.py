"""Examples to token ids: the one function behind training, sampling, evaluation and serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal

import torch

from lehr.data.conversations import SystemPolicy, TrainOn, prepared, trained_turns, unmarked
from lehr.data.documents import block_bounds, document_policy, leading_token
from lehr.data.encoded_rows import (
    DROPPED_BRANCH,
    DROPPED_EMPTY,
    DROPPED_NO_ANSWER,
    DROPPED_PROMPT,
    DROPPED_TOO_LONG,
    DROPPED_UNICODE,
    DROPPED_UNSUPERVISED,
    NOTE_EQUAL_BRANCHES,
    Encoding,
    as_encoded,
)
from lehr.data.losses import losses, own_words
from lehr.data.sequences import Sequencer, TokenSequence
from lehr.data.shapes import Encoded, Example, Origin
from lehr.data.templates import Template, TemplateRaised
from lehr.data.tokenization import TextTokenizer
from lehr.data.turns import DoesNotFit, Script, TurnReader
from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash

Overflow = Literal["truncate", "drop", "split"]

ENCODING_VERSION = 2  # raised by every change that can change an id or a mask


class Encoder:
    """Encodes examples for one model.

    tokenizer       a transformers tokenizer with a `tokenizers` backend
    template        its chat template, or None for a model that only reads text
    date            what templates see as today, YYYY-MM-DD
    system          keep | merge (into the next user turn) | drop
    document_begin, document_end   put the model's document tokens around plain text
    stop_ids        more ids that end generation (from the generation config)

    Raises RecipeError for a tokenizer that cannot be taken apart, a template that this
    renderer and transformers render differently, or one without any stop token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Template | None,
        date: str,
        system: SystemPolicy = "keep",
        document_begin: bool = True,
        document_end: bool = True,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.system: SystemPolicy = system
        self.text = TextTokenizer(tokenizer)
        self.documents = document_policy(tokenizer, self.text, document_begin, document_end)
        end = tokenizer.eos_token_id
        stops = set(stop_ids) | ({end} if end is not None else set())
        self._turns: TurnReader | None = None
        if template is not None:
            difference = template.difference_from_transformers(tokenizer)
            if difference is not None:
                raise RecipeError(Problem("template", f"a template rendered alike: {difference}"))
            self._turns = TurnReader(template, date, self.text, stops)
            if not stops:
                expected = "a template or a tokenizer with an end token, to learn to stop"
                raise RecipeError(Problem("template", expected))
        self.stop_ids: frozenset[int] = frozenset(stops)
        stop_token = end if end is not None else min(stops, default=-1)
        self._sequencer = Sequencer(self.text, leading_token(tokenizer), stop_token)
        self.fingerprint: str = content_hash(
            [
                ENCODING_VERSION,
                self.text.fingerprint,
                None if template is None else [template.source, template.tool_source],
                None if template is None else {k: str(v) for k, v in template.tokens.items()},
                [date, system, self.documents.begin, self.documents.end],
                sorted(self.stop_ids),
                [version(name) for name in ("tokenizers", "jinja2", "transformers")],
            ]
        )

    @property
    def turns(self) -> TurnReader:
        if self._turns is None:
            expected = "a chat template for this model (template: chatml, or a Jinja file)"
            raise RecipeError(Problem("template", expected, "auto"))
        return self._turns

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The generation prompt after `messages`, as serving renders it.

        A prefix of the ids of every chat that continues these messages, where the
        template allows one at all. Raises TemplateRaised.
        """
        script = self.turns.prompt(unmarked(prepared(messages, self.system)), tools)
        return self._sequencer.sequence(script).ids

    def text_ids(self, text: str) -> list[int]:
        """Plain text as one document, with its begin and end tokens."""
        return self._document(text)[0]

    def _document(self, text: str) -> tuple[list[int], list[int]]:
        text.encode()  # UnicodeEncodeError at a lone surrogate, which is no text
        ids, counts = self.text.ids_and_bytes(text)
        if self.documents.begin is not None:
            ids, counts = [self.documents.begin, *ids], [0, *counts]
        if self.documents.end is not None:
            ids, counts = [*ids, self.documents.end], [*counts, 0]
        return ids, counts

    def decode(self, ids: Iterable[int]) -> str:
        """An answer as text: control tokens removed, but for markers that structure it."""
        markers = {self.text.controls[name] for name in self.text.markers} - self.stop_ids
        hidden = (self.text.control_ids | self.stop_ids) - markers
        shown = [int(number) for number in ids if int(number) not in hidden]
        text: str = self.tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(
        self,
        example: Example,
        train_on: TrainOn = "assistant",
        max_length: int = 1024,
        overflow: Overflow = "truncate",
    ) -> Encoding:
        """Tokenise one example; what cannot be used is dropped with its reason.

        Raises RecipeError when the model has no template for a chat, or when
        `overflow` is split for anything but plain text.
        """
        encoding = Encoding()
        if overflow == "split" and example.kind != "text":
            expected = "truncate or drop: only plain text can be split"
            raise RecipeError(Problem("overflow", expected, overflow))
        try:
            if example.kind == "text":
                self._encode_text(example, max_length, overflow, encoding)
            elif example.kind == "chat":
                self._encode_chat(example, train_on, max_length, overflow, encoding)
            else:
                self._encode_branches(example, max_length, overflow, encoding)
        except TemplateRaised as error:
            encoding = Encoding()
            encoding.drop(self._why_raised(error, example), example.origin)
        except UnicodeEncodeError:  # a lone surrogate: legal in JSON, but no text
            encoding = Encoding()
            encoding.drop(DROPPED_UNICODE, example.origin)
        encoding.settle(example.origin)
        return encoding

    def _why_raised(self, error: TemplateRaised, example: Example) -> str:
        reason = f"the template raises: {error.reason}"
        has_system = any(message.get("role") == "system" for message in example.messages)
        if self.system == "keep" and has_system and "system" in error.reason.lower():
            reason += " (remedy: system: merge)"
        return reason

    def _encode_text(
        self, example: Example, max_length: int, overflow: Overflow, encoding: Encoding
    ) -> None:
        ids, counts = self._document(example.text)
        bounds = block_bounds(len(ids), max_length)
        if len(bounds) > 1 and overflow == "drop":
            return encoding.drop(DROPPED_TOO_LONG, example.origin, len(ids))
        if overflow == "truncate":
            bounds = [(0, min(len(ids), max_length))]
        for start, end in bounds:
            if end - start < 2:
                continue
            encoding.kept_tokens += end - start
            mask = [False] + [True] * (end - start - 1)
            size = sum(counts[start + 1 : end])
            encoding.encoded.append(as_encoded(ids[start:end], mask, example.origin, size))
        encoding.dropped_tokens = len(ids) - encoding.kept_tokens
        if not encoding.encoded:
            encoding.drop(DROPPED_UNSUPERVISED, example.origin)
        return None

    def _encode_chat(
        self,
        example: Example,
        train_on: TrainOn,
        max_length: int,
        overflow: Overflow,
        encoding: Encoding,
    ) -> None:
        marked = prepared(example.messages, self.system)
        trained = trained_turns(marked, train_on)
        if not any(trained):
            return encoding.drop(DROPPED_NO_ANSWER, example.origin, 0)
        # What follows the last trained answer supervises nothing, and some templates
        # render an answer otherwise when something follows it.
        length = len(trained) - trained[::-1].index(True)
        messages, trained = unmarked(marked[:length]), trained[:length]
        scripts = self._scripts(messages, trained, example.tools, encoding.notes)
        if not any(script.answers for script in scripts):
            return encoding.drop(DROPPED_EMPTY, example.origin, 0)
        for script in scripts:
            if script.answers:
                sequence = self._sequencer.sequence(script)
                self._add_sequence(sequence, example.origin, max_length, overflow, encoding)
        return None

    def _scripts(
        self,
        messages: list[dict[str, Any]],
        trained: Sequence[bool],
        tools: Sequence[Mapping[str, Any]],
        notes: list[str],
    ) -> list[Script]:
        """One script for the chat, or one per trained turn where they do not fit together."""
        turns = self.turns
        try:
            script, found = turns.whole(messages, trained, tools)
            notes += found + losses(script.rendered, messages, tools)
            notes += own_words(script, messages)
            return [script]
        except DoesNotFit as why:
            if sum(trained) > 1:
                notes.append(str(why))
        scripts: list[Script] = []
        for index, wanted in enumerate(trained):
            if not wanted:
                continue
            part = messages[: index + 1]
            try:
                script, found = turns.whole(part, [False] * index + [True], tools)
            except DoesNotFit:
                script, found = turns.joined(part, tools)
            notes += found + losses(script.rendered, part, tools)
            notes += own_words(script, part)
            scripts.append(script)
        return scripts

    def _add_sequence(
        self,
        sequence: TokenSequence,
        origin: Origin,
        max_length: int,
        overflow: Overflow,
        encoding: Encoding,
    ) -> None:
        total = len(sequence.ids)
        if total > max_length and overflow == "drop":
            return encoding.drop(DROPPED_TOO_LONG, origin, total)
        kept = min(total, max_length)
        mask = sequence.supervised[:kept]
        if not any(mask):
            return encoding.drop(DROPPED_UNSUPERVISED, origin, total)
        size = self._sequencer.supervised_bytes(sequence, kept)
        encoding.encoded.append(as_encoded(sequence.ids[:kept], mask, origin, size))
        encoding.kept_tokens += kept
        encoding.dropped_tokens += total - kept
        return None

    def _encode_branches(
        self, example: Example, max_length: int, overflow: Overflow, encoding: Encoding
    ) -> None:
        continuations = [part for part in (example.chosen, example.rejected) if part]
        first = [part[0].get("role") for part in continuations]
        if not continuations or any(role != "assistant" for role in first):
            return encoding.drop(DROPPED_BRANCH, example.origin, 0)
        prompt = self.prompt_ids(example.messages, example.tools)
        before = len(unmarked(prepared(example.messages, self.system)))
        sequences: list[TokenSequence] = []
        for part in continuations:
            messages = unmarked(prepared([*example.messages, *part], self.system))
            trained = [False] * before + [m.get("role") == "assistant" for m in messages[before:]]
            scripts = self._scripts(messages, trained, example.tools, encoding.notes)
            if len(scripts) != 1:
                return encoding.drop(DROPPED_PROMPT, example.origin)
            if not scripts[0].answers:
                return encoding.drop(DROPPED_EMPTY, example.origin)
            sequence = self._sequencer.sequence(scripts[0])
            if sequence.ids[: len(prompt)] != prompt or sequence.answer_start < len(prompt):
                return encoding.drop(DROPPED_PROMPT, example.origin)
            sequences.append(sequence)
        lengths = [sequence.answer_end - len(prompt) for sequence in sequences]
        total = len(prompt) + sum(lengths)
        if len(prompt) + max(lengths) > max_length and overflow == "drop":
            return encoding.drop(DROPPED_TOO_LONG, example.origin, total)
        branches: list[Encoded] = []
        for sequence in sequences:
            end = min(sequence.answer_end, max_length)
            mask = sequence.supervised[len(prompt) : end]
            if not any(mask):
                return encoding.drop(DROPPED_UNSUPERVISED, example.origin, total)
            size = self._sequencer.supervised_bytes(sequence, end)
            branches.append(as_encoded(sequence.ids[len(prompt) : end], mask, example.origin, size))
        if len(branches) == 2 and torch.equal(branches[0].ids, branches[1].ids):
            encoding.notes.append(NOTE_EQUAL_BRANCHES)
        root = as_encoded(prompt, [False] * len(prompt), example.origin, 0, tuple(branches))
        encoding.encoded.append(root)
        encoding.kept_tokens = root.tokens
        encoding.dropped_tokens = total - root.tokens
        return None
