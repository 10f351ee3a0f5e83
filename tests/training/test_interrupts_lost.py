"""A signal whose exception Python lost (in a finalizer) still ends the training that follows."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lehr import signals
from lehr.training.interrupts import Interrupts


@pytest.fixture
def heard() -> Iterator[None]:
    yield
    signals.working()


class Finalized:
    def __del__(self) -> None:
        signals.interrupt(signal.SIGTERM, None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("heard")
def test_a_lost_signal_is_asked_for_again() -> None:
    with Interrupts() as before:
        assert before.requested is None
    one = Finalized()
    del one  # raises KeyboardInterrupt, which is ignored here
    with Interrupts() as after:
        assert after.requested == "a signal"
    signals.working()
    with Interrupts() as anew:
        assert anew.requested is None
