"""Lineage in words."""

from __future__ import annotations

from lehr.report.provenance import export_words


def test_parity_is_a_sentence():
    passed = {"gap": 0.0, "kl": 0.0, "positions": 234, "cast": False, "problem": ""}

    def words(**changes: object) -> str:
        return export_words({"parity": passed | changes})

    assert words() == "the same as trained, bit for bit on 234 tokens"
    assert "at most 5e-05 nats apart" in words(gap=4.6e-5)
    assert "KL 2e-04 nats a token, rounded" in words(cast=True, kl=2e-4)
    assert words(problem="other ids") == "NOT what was trained: other ids"
    assert export_words({}) == ""
    instead = export_words({"parity": passed, "cast_refused": {"problem": "KL 2.8e-03"}})
    assert instead.endswith("in fp32, because in the base's dtype it would be off (KL 2.8e-03)")
