"""E4M3 and E5M2 against a decoder written from the OCP tables, on all 256 codes."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import pytest
import torch

from lehr.errors import RecipeError
from lehr.training.float8_formats import E4M3, E5M2, decode, encode, format_named, round_to

BOTH = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)


def table_value(code: int, form) -> float:
    """OFP8 v1.0, tables 1 and 2: sign, exponent and mantissa of one code."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> form.mantissa_bits
    mantissa = code & ((1 << form.mantissa_bits) - 1)
    if form.name == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if form.name == "e5m2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    share = mantissa / (1 << form.mantissa_bits)
    if exponent == 0:
        return sign * share * 2.0 ** (1 - form.bias)
    return sign * (1 + share) * 2.0 ** (exponent - form.bias)


def all_codes(form) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form.dtype)


def finite_values(form) -> list[float]:
    """Every magnitude of the format, from 0 up."""
    values = [table_value(code, form) for code in range(128)]
    return [value for value in values if math.isfinite(value)]


def nearest(value: float, form) -> float:
    """By search, in exact arithmetic; ties to the even code. Saturates."""
    magnitudes = finite_values(form)
    exact = Fraction(abs(value))
    above = bisect.bisect_left(magnitudes, abs(value))
    candidates = range(max(0, above - 1), min(len(magnitudes), above + 1))
    best = min(candidates, key=lambda code: (abs(Fraction(magnitudes[code]) - exact), code % 2))
    return math.copysign(magnitudes[best], value)


@BOTH
def test_all_256_codes_decode_as_the_table_says(form) -> None:
    values = decode(all_codes(form))
    for code, value in enumerate(values.tolist()):
        wanted = table_value(code, form)
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), code
        assert math.copysign(1, value) == math.copysign(1, wanted) or math.isnan(wanted)


def test_counts_and_ends_of_the_tables() -> None:
    e4m3, e5m2 = decode(all_codes(E4M3)), decode(all_codes(E5M2))
    assert int(e4m3.isfinite().sum()) == 254 and int(e4m3.isnan().sum()) == 2
    assert int(e4m3.isinf().sum()) == 0
    assert int(e5m2.isfinite().sum()) == 248 and int(e5m2.isnan().sum()) == 6
    assert int(e5m2.isinf().sum()) == 2
    for form, values in ((E4M3, e4m3), (E5M2, e5m2)):
        finite = values[values.isfinite()]
        assert float(finite.max()) == form.largest
        assert float(finite[finite > 0].min()) == form.smallest
    assert (E4M3.largest, E4M3.smallest) == (448.0, 2.0**-9)
    assert (E5M2.largest, E5M2.smallest) == (57344.0, 2.0**-16)


@BOTH
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_every_code_round_trips(form, overflow) -> None:
    codes = all_codes(form)
    values = decode(codes)
    back = encode(values, form, overflow)
    same = back.view(torch.uint8) == codes.view(torch.uint8)
    assert bool((same | values.isnan()).all())
    assert bool(decode(back)[values.isnan()].isnan().all())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nearest_with_ties_to_even(form, dtype) -> None:
    magnitudes = finite_values(form)
    halves = [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)]
    near = [half * (1 + sign * 2.0**-9) for half in halves for sign in (-1, 1)]
    stream = torch.Generator().manual_seed(0)
    random = (torch.randn(300, generator=stream) * torch.logspace(-6, 4, 300)).tolist()
    given = torch.tensor([*halves, *near, *random], dtype=torch.float64).to(dtype)
    given = torch.cat([given, -given])
    given = given[given.isfinite()]
    rounded = decode(encode(given, form)).tolist()
    for value, result in zip(given.double().tolist(), rounded, strict=True):
        assert result == nearest(value, form), value


def test_float64_is_rounded_once() -> None:
    """Just above a tie in float64, at the tie in fp32: torch's own cast goes to the wrong side."""
    above = torch.tensor([1 + 2.0**-4 + 2.0**-40], dtype=torch.float64)
    assert float(above.to(torch.float8_e4m3fn).float()) == 1.0
    assert float(round_to(above, E4M3)) == 1.125
    assert round_to(above, E4M3).dtype == torch.float64


@BOTH
def test_error_of_normal_values_is_bounded(form) -> None:
    values = torch.logspace(math.log2(2 ** (1 - form.bias)), 8, 5000, base=2.0)
    error = ((round_to(values, form) - values).abs() / values).max()
    reached = form.relative_error / (1 + form.relative_error)  # half a step above a power of two
    assert 0.98 * reached < float(error) <= reached < form.relative_error


def test_saturation_keeps_infinities_visible() -> None:
    inf, nan = math.inf, math.nan
    given = torch.tensor([449.0, 464.0, 1e30, -1e30, inf, -inf, nan])
    e4m3 = round_to(given, E4M3)
    assert e4m3[:4].tolist() == [448.0, 448.0, 448.0, -448.0]
    assert bool(e4m3[4:].isnan().all()), "an infinity became a number"
    given = torch.tensor([57345.0, 61440.0, 1e30, -1e30, inf, -inf, nan])
    e5m2 = round_to(given, E5M2)
    assert e5m2[:4].tolist() == [57344.0, 57344.0, 57344.0, -57344.0]
    assert e5m2[4:6].tolist() == [inf, -inf] and bool(e5m2[6].isnan())


def test_nonfinite_policy_overflows_where_rounding_leaves_the_range() -> None:
    given = torch.tensor([464.0, 464.01, -465.0, math.inf])
    result = round_to(given, E4M3, "nonfinite")
    assert result[0] == 448.0 and bool(result[1:].isnan().all())
    for dtype in (torch.float32, torch.float64):
        given = torch.tensor([61439.0, 61440.0, -61440.0, -math.inf, 1e300], dtype=dtype)
        result = round_to(given, E5M2, "nonfinite")
        assert result.tolist() == [57344.0, math.inf, -math.inf, -math.inf, math.inf]


def test_torchs_own_casts_have_the_faults_that_this_one_has_not() -> None:
    """If torch changes, the module's docstring must change with it."""
    assert float(torch.tensor(61440.0).to(torch.float8_e5m2).float()) == math.inf
    assert math.isfinite(float(torch.tensor(500.0).to(torch.float8_e4m3fn).float()))
    assert float(torch.tensor(math.inf).to(torch.float8_e4m3fn).float()) == 448.0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="floating values"):
        encode(torch.tensor([1, 2]), E4M3)
    with pytest.raises(ValueError, match="saturate or nonfinite"):
        encode(torch.tensor([1.0]), E4M3, "clip")
    with pytest.raises(RecipeError, match="e4m3 or e5m2"):
        format_named("e3m4")
    assert encode(torch.empty(0, 3), E5M2).shape == (0, 3)
