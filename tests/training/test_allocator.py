"""Freed memory stays with the process."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lehr.training import allocator

ASK = """
import resource, torch
from lehr.training.allocator import keep_freed_memory
kept = keep_freed_memory() if {kept} else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    blocks = [torch.ones(16 * 2**20) for _ in range(3)]
    return blocks
for _ in range(4):
    use()
before = faults()
for _ in range(10):
    use()
print(kept, faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has these options")
def test_the_same_sizes_again_cost_no_page_faults():
    def ask(kept: bool) -> list[str]:
        command = [sys.executable, "-c", ASK.format(kept=kept)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    (said, kept), (_, given_back) = ask(True), ask(False)
    assert said == "True"
    assert int(kept) * 4 < int(given_back)


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert allocator.keep_freed_memory() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has these options")
def test_an_older_library_takes_the_largest_size_that_it_allows(monkeypatch):
    taken = {}

    def mallopt(option: int, size: int) -> int:
        if option == -3 and size > 2**25:  # HEAP_MAX_SIZE / 2
            return 0
        taken[option] = size
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert allocator.keep_freed_memory() is True
    assert taken == {-1: 2**30, -2: 2**28, -3: 2**25}
