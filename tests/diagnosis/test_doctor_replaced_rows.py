"""A row that is not finite and that a later one replaces leaves no flag, and no crash."""

from __future__ import annotations

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_curve import curve_of_rows
from lehr.diagnosis.doctor_look import Context


def test_the_only_bad_row_is_computed_again():
    rows = [{"update": n, "loss": 3.0 - 0.01 * n, "grad_norm": 1.0} for n in range(40)]
    bad = {"update": 20, "loss": None, "grad_norm": None, "nonfinite": ["loss", "grad_norm"]}
    back = [*rows[:25], bad | {"update": 25}, *rows[20:]]  # went back to 20 and on
    for replaced in ([*rows[:20], bad, *rows[20:]], [*rows[:21], bad, *rows[21:]], back):
        curve = curve_of_rows(replaced)
        assert all(flags.any() for flags in curve.nonfinite.values())
        diagnose(curve, Context())
