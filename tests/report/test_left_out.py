"""Batches that were not trained on: named with update, reason and rows."""

from __future__ import annotations

from lehr.report.left_out import left_out

ORIGINS = [f"a.jsonl:{n}" for n in range(60)]
METRICS = [
    {"attempt": 1, "update": 1, "skipped": False},
    {
        **{"attempt": 2, "update": 1, "skipped": True, "origins": ["a.jsonl:3"]},
        **{"guard.signal": "loss", "guard.value": 9.0, "guard.usual": 2.0, "guard.limit": 3.0},
    },
    {"attempt": 3, "update": 1, "skipped": True, "loss_scale": 8.0},  # an overflow: not meant
    {"attempt": 4, "update": 1, "skipped": True, "origins": ORIGINS, "quarantined": True},
    {"attempt": 5, "update": 1, "skipped": True, "origins": ["b:1"], "nonfinite": ["loss"]},
    {"attempt": 6, "update": 1, "skipped": True, "origins": ["b:2"], "quarantined": True},
]
RECORD = [
    {"key": "k", "attempt": 4, "update": 1, "why": "loss of a 9", "origins": ORIGINS, "rewind": 1},
    {"key": "k", "attempt": 9, "update": 7, "why": "not finite", "origins": ["c:1"], "rewind": 0},
    {"key": "other", "attempt": 8, "update": 7, "why": "", "origins": ["c:1"], "rewind": 0},
]


def test_every_batch_with_update_reason_and_rows():
    found = left_out(METRICS, RECORD, "k")
    assert [(one["attempt"], one["update"], one["how"]) for one in found] == [
        (2, 2, "skipped"),
        (4, 2, "in quarantine"),
        (5, 2, "skipped"),
        (6, 2, "in quarantine"),
        (9, 8, "in quarantine"),
    ]
    assert [one["why"] for one in found] == [
        "loss 9 (usual 2, limit 3)",
        "loss of a 9",
        "not finite: loss",
        "named in the record that the recipe gives (guard.quarantine)",
        "not finite",
    ]
    assert found[1]["rows"] == 60 and len(found[1]["origins"]) == 50
    assert left_out([], []) == []


def test_what_is_damaged_stops_nothing():
    assert left_out([{"skipped": True, "origins": 3, "attempt": 1}], [{"attempt": "x"}, {}])
