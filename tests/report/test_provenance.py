"""Lineage in words."""

from __future__ import annotations

from lehr.report.provenance import parity_words


def test_parity_is_a_sentence():
    passed = {"gap": 0.0, "kl": 0.0, "positions": 234, "cast": False, "problem": ""}
    assert parity_words(passed) == "the same as trained, bit for bit, on 234 tokens"
    assert "at most 5e-05 nats apart" in parity_words(passed | {"gap": 4.6e-5})
    assert "as rounded" in parity_words(passed | {"cast": True, "kl": 2e-4})
    assert parity_words(passed | {"problem": "other ids"}) == "NOT what was trained: other ids"
    assert parity_words({}) == ""
