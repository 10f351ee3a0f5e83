"""Stop strings: across token boundaries, as soon as they are whole, cut from the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_decode import llama, some_prompts

from lehr.errors import LehrError
from lehr.generation.decode import Generated, generate
from lehr.generation.stops import StopStrings, before_stop, first_of

# A vocabulary of pieces; token n is PIECES[n].
PIECES = ["a", "b", "\n", "Q", ":", "ab", "Q:", "\nQ", "é", " "]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def first_end(stops: StopStrings, ids: Sequence[int]) -> tuple[int, str] | None:
    for end in range(1, len(ids) + 1):
        found = stops.found(ids[:end])
        if found is not None:
            return end, found
    return None


@pytest.mark.parametrize(
    "ids", [[0, 2, 3, 4, 0], [0, 7, 4, 0], [0, 2, 6, 0]], ids=["single", "joined", "two"]
)
def test_a_string_is_found_whatever_its_tokens_are(ids: list[int]) -> None:
    stops = StopStrings(["\nQ:"], decode)
    end, found = first_end(stops, ids) or (0, "")
    assert found == "\nQ:" and decode(ids[:end]) == "a\nQ:"
    assert before_stop(decode(ids[:end]), found) == "a"


def test_only_the_last_tokens_are_decoded() -> None:
    seen: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return decode(ids)

    stops = StopStrings(["ab"], counting)
    ids = [9] * 500 + [0, 1]
    assert first_end(stops, ids) == (502, "ab")
    assert max(seen) <= 10
    # Multi-byte text: as many tokens as it has bytes, at least.
    assert StopStrings(["é" * 20], decode).found([8] * 20) == "é" * 20


def test_the_earliest_string_counts_and_the_longest_of_these() -> None:
    assert first_of(["Q", "\nQ"], "a\nQ") == "\nQ"
    assert first_of(["a", "ab"], "xab") == "ab"
    assert first_of(["z"], "xab") is None
    assert before_stop("xaby", None) == "xaby"


def test_generation_ends_at_a_string() -> None:
    model, prompts = llama(), some_prompts(6)
    settings: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": frozenset()}
    words = lambda ids: "".join(f"<{token}>" for token in ids)  # noqa: E731
    for through in ("lean", "network"):
        free = generate(model, prompts, through=through, **settings)
        # Half a token's text, the boundary, and half of the next one's.
        stop = f"{free[0].ids[3]}><{free[0].ids[4]}"
        ended = generate(
            model, prompts, through=through, stop_strings=[stop], decode=words, **settings
        )
        for one, whole in zip(ended, free, strict=True):
            text = words(whole.ids)
            if stop not in text:
                assert one.ids == whole.ids and one.stop_string is None
                continue
            assert one.stop_string == stop and not one.stopped
            assert one.ids == whole.ids[: len(one.ids)] and stop in words(one.ids)
            assert stop not in words(one.ids[:-1])
            assert one.text(words) == text[: text.index(stop)]
        assert ended[0].stop_string == stop


def test_a_stop_id_goes_before_a_string() -> None:
    one = Generated([5, 6, 3], True)
    assert one.text(lambda ids: str(list(ids))) == "[5, 6]"


def test_bad_stop_strings_are_named() -> None:
    bad: list[dict[str, Any]] = [
        {"stop_strings": ["x"]},
        {"stop_strings": "x", "decode": decode},
        {"stop_strings": [""], "decode": decode},
        {"row_seeds": [1, 2]},
    ]
    for how in bad:
        with pytest.raises(LehrError):
            generate(llama(), [[1]], max_new_tokens=1, stop_ids=set(), **how)
    assert torch.is_grad_enabled()
