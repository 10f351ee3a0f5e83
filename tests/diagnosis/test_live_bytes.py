"""Live bytes as torch's allocator books them, against tensors of known size."""

from __future__ import annotations

import pytest
import torch

from lehr.diagnosis.live_bytes import live_tensor_bytes, mark, recording, timeline_of
from lehr.models.head import Head, token_stats


def test_arithmetic_of_a_timeline_by_hand() -> None:
    found = timeline_of([(10, 100), (20, 50), (30, -100), (40, 20)], 7, {"part": [(15, 35)]})
    assert (found.peak, found.at(9), found.at(10), found.at(39)) == (157, 7, 107, 57)
    assert found.peak_between(30, 50) == 77
    assert found.left_by("part") == [-50], "57 at its end, 107 at its beginning"
    assert found.raised_by("part") == [50]
    assert found.left_by("absent") == []


def test_a_recording_sees_sizes_frees_and_marks() -> None:
    with recording(before=1000) as found:
        with mark("made"):
            first = torch.zeros(1000)
            second = first.exp()
        del first
        third = second * 2  # no more than two of them live at once
    assert found.timeline.peak == pytest.approx(1000 + 8000, abs=64), "numbers are tensors too"
    assert found.timeline.left_by("made") == [8000]
    assert found.timeline.bytes[-1] == 1000 + 8000
    del second, third
    with recording() as unfinished, pytest.raises(RuntimeError, match="not ended"):
        _ = unfinished.timeline


def test_what_lives_is_counted_once_and_what_is_left_out_not_at_all() -> None:
    before = live_tensor_bytes()
    weight = torch.nn.Parameter(torch.zeros(2000))
    views = [weight.detach().view(2, 1000), weight.detach()[5:]]
    assert live_tensor_bytes() - before == 8000
    weight.grad = torch.zeros(2000)
    assert live_tensor_bytes() - before == 16000
    assert live_tensor_bytes(without=views) - before == 8000


@pytest.mark.parametrize(
    ("dtype", "trains"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
)
def test_logits_of_one_chunk_live_at_once(dtype: torch.dtype, trains: bool) -> None:
    """The fault: names of a loop keep the last chunk's logits beside the next one's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, 8, generator=generator).to(dtype).requires_grad_(trains)
    hidden = torch.randn(64, 8, generator=generator).to(dtype).requires_grad_()

    def peak(pairs: int) -> int:
        at = torch.arange(pairs)
        with recording() as found:
            stats = token_stats(hidden, at, at, Head(weight), chunk=16)
            stats.log_probability.sum().backward()
        weight.grad = hidden.grad = None
        return found.timeline.peak

    peak(16)  # what is made once
    logits = 16 * 2000 * 4
    assert abs(peak(64) - peak(16)) < logits / 4
