"""The table of a replayed batch, where nothing is near enough to compare it with."""

from __future__ import annotations

from lehr.cli.spike import table
from lehr.diagnosis.spike import Replay, Values


def test_what_is_not_known_is_said() -> None:
    alone = Replay("update 3, which it met", 3, Values(1.5, (), ()))
    lines = table([alone])
    assert "nan" not in " ".join(lines)
    assert lines[1].split()[-3:] == ["1.5", "-", "-"]
    assert "is not known" in lines[2]
