"""The gradient noise scale: unbiased, averaged before it is divided, with its uncertainty."""

import json
import math
import shutil

import pytest
import torch
from rank_workers import Share, joined, run_ranks
from small_runs import Cycle, NextToken, Small, lines_of, make_engine, rows, weights_hash

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.noise_scale import FEWEST, NoisePair, NoiseScale, noise_scale, pair_of

SIZE = 50


def drawn(updates, sizes=(4, 4, 4, 4), truth=1.0, spread=110.0, seed=0):
    """Pairs of updates whose gradient has |G|² = truth and S = spread exactly."""
    stream = generator_for("noise", seed)
    mean = torch.full((SIZE,), (truth / SIZE) ** 0.5, dtype=torch.float64)
    shares = [size / sum(sizes) for size in sizes]
    found = []
    for _ in range(updates):
        parts = [
            mean + (spread / SIZE / size) ** 0.5
            * torch.randn(SIZE, generator=stream, dtype=torch.float64)
            for size in sizes
        ]  # fmt: skip
        whole = sum(share * part for share, part in zip(shares, parts, strict=True))
        squares = [float(part.square().sum()) for part in parts]
        found.append(pair_of(float(whole.square().sum()), squares, sizes, shares))
    return found


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (1, 7, 20)])
def test_the_pair_is_unbiased_also_for_unequal_parts(sizes):
    pairs = drawn(4000, sizes)
    for values, truth in (([p.signal for p in pairs], 1.0), ([p.noise for p in pairs], 110.0)):
        mean = sum(values) / len(values)
        error = torch.tensor(values).std().item() / len(values) ** 0.5
        assert abs(mean - truth) < 4 * error and error < 0.2 * truth


def test_equal_parts_are_the_formula_of_the_paper():
    """S = (|g_b|² - |g_B|²) / (1/b - 1/B), |G|² = (B |g_B|² - b |g_b|²) / (B - b)."""
    b, big, small, whole = 4.0, 16.0, 30.0, 9.0
    pair = pair_of(whole, [29.0, 31.0, 28.0, 32.0], [b] * 4, [0.25] * 4)
    assert pair.noise == pytest.approx((small - whole) / (1 / b - 1 / big))
    assert pair.signal == pytest.approx((big * whole - b * small) / (big - b))
    with pytest.raises(ValueError, match="two micro-batches"):
        pair_of(1.0, [1.0], [4], [1.0])


def test_averaging_comes_before_the_division():
    """True 110; the mean of ratios is biased, and worse the noisier an update is."""
    pairs = drawn(2000, sizes=(60,) * 8)
    found = noise_scale(pairs)
    mean_of_ratios = sum(p.noise / p.signal for p in pairs) / len(pairs)
    print(f"true 110, ratio of means {found.scale:.1f} ({found.low:.1f} to {found.high:.1f}), "
          f"mean of ratios {mean_of_ratios:.1f}")  # fmt: skip
    assert found.low < 110 < found.high and abs(found.scale - 110) < 3
    assert mean_of_ratios > found.high


def test_the_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(200):
        found = noise_scale(drawn(20, sizes=(50,) * 4, seed=seed))
        held += found.low <= 110 <= found.high
    assert 180 <= held <= 199


def test_a_gradient_that_is_not_told_from_noise_has_no_upper_end():
    found = noise_scale(drawn(10, sizes=(1, 1), truth=1e-4))
    assert found.high == math.inf and 0 <= found.low < 1.1e6
    assert "not certain enough" in found.advice(8) or "mostly noise" in found.advice(8)
    assert noise_scale(drawn(FEWEST - 1)) is None


def test_advice_takes_the_interval_into_account():
    sure = NoiseScale(100.0, 80.0, 130.0, 50)
    assert "mostly noise" in sure.advice(16) and "about right" in sure.advice(100)
    assert "more than it can use" in sure.advice(1000)
    assert "not certain enough" in NoiseScale(100.0, 5.0, 2000.0, 6).advice(100)


# --- in a run ---------------------------------------------------------------------------


def run(folder, updates=8, **changes):
    seen = []
    values = {"batches": Cycle(rows(12), 6), "micro_batch": 2, "evaluate": None} | changes
    model = changes.get("model") or Small(dropout=0.0)
    engine = make_engine(folder, updates, **(values | {"model": model, "observers": [seen.append]}))
    engine.run()
    return engine, seen


def test_the_engine_measures_what_single_gradients_give(tmp_path):
    run(tmp_path, 1, noise_scale_every=1)
    model, packs, objective = Small(dropout=0.0), Cycle(rows(12), 6).next(), NextToken()
    parts = [packs[i : i + 2] for i in (0, 2, 4)]
    squares, weights, total = [], [], {}
    for part in parts:
        model.zero_grad()
        loss = sum(objective.loss(model, pack).total for pack in part)
        loss.backward()
        weight = sum(objective.weight(pack) for pack in part)
        weights.append(weight)
        own = {name: one.grad.double() / weight for name, one in model.named_parameters()}
        squares.append(sum(float(g.square().sum()) for g in own.values()))
        total = {name: total.get(name, 0) + weight * g for name, g in own.items()}
    whole = sum(float((g / sum(weights)).square().sum()) for g in total.values())
    pair = pair_of(whole, squares, [2, 2, 2], [weight / sum(weights) for weight in weights])
    line = lines_of(tmp_path)[0]
    assert line["noise.gradient_squared"] == pytest.approx(pair.signal, rel=1e-4)
    assert line["noise.variance"] == pytest.approx(pair.noise, rel=1e-4)
    assert "noise.scale" not in line  # one update says nothing


def test_measuring_changes_no_bit_and_ends_with_advice(tmp_path):
    plain, _ = run(tmp_path / "plain")
    measured, seen = run(tmp_path / "measured", noise_scale_every=1)
    assert weights_hash(plain.model) == weights_hash(measured.model)
    (event,) = [one for one in seen if isinstance(one, events.NoiseScaleMeasured)]
    lines = lines_of(tmp_path / "measured")
    pairs = [NoisePair(row["noise.gradient_squared"], row["noise.variance"]) for row in lines]
    assert event.scale == noise_scale(pairs) and event.batch_size == 6
    _, seen = run(tmp_path / "third", noise_scale_every=3)
    assert ["noise.variance" in row for row in lines_of(tmp_path / "third")] == [
        update % 3 == 0 for update in range(1, 9)
    ]
    assert not any(isinstance(one, events.NoiseScaleMeasured) for one in seen)  # two: too few


def test_a_resumed_run_says_the_same(tmp_path):
    def copy(event):
        if isinstance(event, events.CheckpointWritten) and event.update == 5:
            shutil.copytree(tmp_path / "straight", tmp_path / "stopped")

    def go(name, *observers):
        seen = []
        engine = make_engine(
            tmp_path / name, 8, model=Small(), noise_scale_every=1, evaluate=None,
            batches=Cycle(rows(12), 6), observers=[seen.append, *observers],
        )  # fmt: skip
        engine.run()
        return engine, [one for one in seen if isinstance(one, events.NoiseScaleMeasured)]

    straight, said = go("straight", copy)
    resumed, again = go("stopped")
    assert said == again and said
    assert weights_hash(straight.model) == weights_hash(resumed.model)
    assert lines_of(tmp_path / "straight") == lines_of(tmp_path / "stopped")


def rank_work(rank, size, folder):
    with joined(rank, size, folder):
        batches = Share(rows(12), 6) if size == 1 else Pairs(rows(12), 6)
        make_engine(
            folder, 1, model=Small(dropout=0.0), batches=batches, micro_batch=2, evaluate=None,
            noise_scale_every=1,
        ).run()  # fmt: skip
        (folder / f"result-{rank}.json").write_text(json.dumps(rank))


class Pairs(Cycle):
    """Rank r has the r-th two packs of an update."""

    def next(self):
        from lehr import ranks

        return super().next()[2 * ranks.rank() : 2 * ranks.rank() + 2]


def test_ranks_are_micro_batches_of_one_update(tmp_path):
    lines = []
    for size in (1, 3):
        (tmp_path / str(size)).mkdir()
        run_ranks(tmp_path / str(size), size, rank_work)
        lines.append(lines_of(tmp_path / str(size))[0])
    for name in ("noise.gradient_squared", "noise.variance"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4)


def test_one_micro_batch_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(RecipeError, match="noise_scale_every: expected two micro-batches"):
        run(tmp_path, micro_batch=6, noise_scale_every=1)
    with pytest.raises(RecipeError, match="noise_scale_every: expected none with fp16") as caught:
        run(tmp_path / "half", noise_scale_every=1, precision="fp16")
    assert not (tmp_path / "half").exists() and caught.value.problems
