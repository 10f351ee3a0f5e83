"""Cache: the same examples back, complete or absent, made again when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lehr.data.cache import cached_encoded, cached_with_account
from lehr.data.shapes import Encoded, Origin


def _part(ids: list[int], flags: list[bool], line: int, size: int = 0) -> Encoded:
    return Encoded(
        torch.tensor(ids), torch.tensor(flags), Origin("s", "s.jsonl", line), supervised_bytes=size
    )


def _examples() -> list[Encoded]:
    plain = _part([1, 2, 3], [False, True, True], 1, 11)
    prompt = _part([4, 5], [False, False], 2)
    answers = (_part([6], [True], 2, 3), _part([7, 8], [True, False], 2, 4))
    pair = Encoded(prompt.ids, prompt.supervised, prompt.origin, answers)
    return [plain, pair, _part([100_000], [False], 3)]


def _assert_same(one: Encoded, other: Encoded) -> None:
    assert one.ids.dtype == other.ids.dtype == torch.int64
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.supervised, other.supervised)
    assert one.origin == other.origin
    assert one.supervised_bytes == other.supervised_bytes
    assert len(one.branches) == len(other.branches)
    for mine, its in zip(one.branches, other.branches, strict=True):
        _assert_same(mine, its)


class Build:
    """Counts how often it was asked."""

    def __init__(self, examples: list[Encoded] | None = None) -> None:
        self.examples = _examples() if examples is None else examples
        self.calls = 0

    def __call__(self) -> list[Encoded]:
        self.calls += 1
        return self.examples


def test_the_second_time_nothing_is_built(tmp_path: Path) -> None:
    build = Build()
    first = cached_encoded("key", build, tmp_path / "deep" / "cache")
    second = cached_encoded("key", build, tmp_path / "deep" / "cache")
    assert build.calls == 1
    for one, other, made in zip(first, second, build.examples, strict=True):
        _assert_same(one, made)
        _assert_same(other, made)
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 2  # nothing is left aside


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    build = Build()
    cached_encoded("key", build, tmp_path)
    cached_encoded("other key", build, tmp_path)
    assert build.calls == 2


def test_an_empty_list_is_an_entry(tmp_path: Path) -> None:
    build = Build([])
    assert cached_encoded("key", build, tmp_path) == []
    assert cached_encoded("key", build, tmp_path) == []
    assert build.calls == 1


def test_an_account_stands_beside_the_examples(tmp_path: Path) -> None:
    account = {"dropped": {"empty answer": 2}, "notes": ["ä"]}
    for _ in range(2):
        found = cached_with_account("key", lambda: (_examples(), account), tmp_path)
        assert found[1] == account
        assert len(found[0]) == 3


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, suffix: str, damage: str) -> None:
    build = Build()
    cached_encoded("key", build, tmp_path)
    (path,) = tmp_path.glob(f"*{suffix}")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        cut = content[: len(content) // 2]
        path.write_bytes({"cut": cut, "flip": flipped, "empty": b""}[damage])
    again = cached_encoded("key", build, tmp_path)
    assert build.calls == 2
    _assert_same(again[1], build.examples[1])
    cached_encoded("key", build, tmp_path)
    assert build.calls == 2


def test_a_sidecar_of_another_shape_is_made_again(tmp_path: Path) -> None:
    build = Build()
    cached_encoded("key", build, tmp_path)
    (path,) = tmp_path.glob("*.json")
    for broken in ([], {"key": "key"}, None):
        path.write_text(json.dumps(broken), encoding="utf-8")
        cached_encoded("key", build, tmp_path)
    assert build.calls == 4


def test_a_folder_that_can_not_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="not cached"):
        assert len(cached_encoded("key", Build(), blocked / "cache")) == 3


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> list[Encoded]:
        raise ValueError("broken row")

    with pytest.raises(ValueError, match="broken row"):
        cached_encoded("key", fail, tmp_path)
    assert list(tmp_path.iterdir()) == []
