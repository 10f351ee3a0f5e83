"""Scores are made once, kept whole, and never compared with unlike ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lehr.errors import LehrError
from lehr.evaluation.default_gates import plan_gates
from lehr.evaluation.divergence import KlFromParent, at_parent, kl_per_sequence
from lehr.evaluation.flips import flips
from lehr.evaluation.judging import judge, overall
from lehr.evaluation.scoring import Scores, ScoreStore, comparable, score_state
from lehr.evaluation.suites import ItemScore, Measure


class Counting:
    """A suite that counts what it was asked and scores by a function of the model."""

    measures: ClassVar[dict[str, Measure]] = {"rate": Measure("share", "lower")}

    def __init__(self, name: str = "over_refusal", n: int = 120, data_hash: str = "d1") -> None:
        self.name, self.data_hash = name, data_hash
        self.items = [f"i{k}" for k in range(n)]
        self.asked: list[str] = []

    def score(self, model: Any, items: Any, encoder: Any) -> list[ItemScore]:
        self.asked.extend(items)
        return [
            ItemScore(
                item,
                self.name,
                "rate",
                float(model(item)),
                passed=not model(item),
                prompt=item,
                answer=f"{model(item)}",
            )
            for item in items
            if item != "i3"  # a row that the encoder drops
        ]


def never(item: str) -> bool:
    return False


def often(item: str) -> bool:
    return int(item[1:]) % 3 == 0


def test_no_item_is_scored_twice(tmp_path: Path, encoder: Any) -> None:
    suite, store = Counting(), ScoreStore(tmp_path)
    first = store.score(never, suite, encoder, "base", suite.items[:10])
    assert len(first.rows) == 9 and len(suite.asked) == 10
    more = store.score(never, suite, encoder, "base", suite.items[:20])
    assert len(suite.asked) == 20 and len(more.rows) == 19
    again = ScoreStore(tmp_path).score(never, suite, encoder, "base", suite.items[:20])
    assert len(suite.asked) == 20, "read back from disk, the dropped row too"
    assert set(again.rows) == set(more.rows)
    store.score(often, suite, encoder, "tuned", suite.items[:5])
    assert len(suite.asked) == 25, "another state has its own file"


def test_a_damaged_file_is_scored_again(tmp_path: Path, encoder: Any) -> None:
    suite = Counting(n=6)
    whole = ScoreStore(tmp_path).score(never, suite, encoder, "base")
    (path,) = tmp_path.glob("*.jsonl")
    content = path.read_bytes()
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        assert ScoreStore(tmp_path).score(never, suite, encoder, "base").rows == whole.rows
    assert not list(tmp_path.glob("*.tmp"))


def test_unlike_scores_are_not_compared(tmp_path: Path, encoder: Any) -> None:
    suite = Counting(n=5)
    before = score_state(never, [suite], encoder)["over_refusal"]
    comparable(before, before)

    class Newer(Counting):
        measures: ClassVar[dict[str, Measure]] = {"rate": Measure("share", "lower", version="2")}

    for other, field in ((Counting(n=5, data_hash="d2"), "data_hash"), (Newer(n=5), "measures")):
        after = score_state(never, [other], encoder)["over_refusal"]
        with pytest.raises(LehrError, match=field):
            comparable(before, after)
    encoder.fingerprint = "characters-2"
    with pytest.raises(LehrError, match="template_hash"):
        comparable(before, score_state(never, [suite], encoder)["over_refusal"])


def test_a_suite_that_scores_nonsense_is_a_bug(encoder: Any) -> None:
    class Nonsense(Counting):
        def score(self, model: Any, items: Any, encoder: Any) -> list[ItemScore]:
            return [ItemScore("i0", self.name, "rate", float("nan"))]

    with pytest.raises(ValueError, match="not finite"):
        score_state(never, [Nonsense()], encoder)


def test_flips_show_both_texts_losses_first(encoder: Any) -> None:
    suite = Counting(n=7)
    before = score_state(often, [suite], encoder)["over_refusal"].of("rate")
    after = score_state(lambda item: item == "i1", [suite], encoder)["over_refusal"].of("rate")
    rows = flips(before, after, "parent")
    assert [(row["id"], row["direction"]) for row in rows] == [
        ("i1", "lost"),
        ("i0", "gained"),
        ("i6", "gained"),
    ]
    assert rows[0]["before"] == "False" and rows[0]["after"] == "True"
    assert rows[0]["against"] == "parent"
    json.dumps(rows)


def test_judging_scores_only_what_decides(tmp_path: Path, encoder: Any) -> None:
    suite, store = Counting(n=400), ScoreStore(tmp_path)
    suites: dict[str, Any] = {suite.name: suite}
    planned = plan_gates("sft", suites)

    def scorer(model: Any, key: str) -> Any:
        def score(one: Any, items: Any) -> Scores:
            return store.score(model, one, encoder, key, items)

        return score

    verdicts = judge(
        planned, suites, scorer(often, "tuned"), {"parent": scorer(never, "parent")}, budget=400
    )
    assert [verdict.verdict for verdict in verdicts] == ["refused"] == [overall(verdicts)]
    assert len(suite.asked) == 2 * 50, "the first look decided"
    verdicts = judge(
        planned, suites, scorer(never, "same"), {"parent": scorer(never, "parent")}, budget=400
    )
    assert overall(verdicts) == "passed" and verdicts[0].difference == 0.0


def test_kl_is_exact_and_zero_for_the_state_itself(tiny: Any, encoder: Any) -> None:
    parent = tiny.state()
    prompts = [({"role": "user", "content": text},) for text in ("hi", "what?", "a")]
    suite = KlFromParent(prompts, parent, max_new_tokens=6)
    for score in suite.score(tiny, suite.items, encoder):
        assert score.value == pytest.approx(0.0, abs=1e-5) and score.weight >= 1
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tiny.trained().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    scores = suite.score(tiny, suite.items, encoder)
    assert all(score.value > 0 for score in scores)
    assert all(score.value == 0 for score in at_parent(scores))

    from lehr.data.shapes import Encoded, Origin

    ids = torch.tensor([1, 10, 11, 12, 3, 2, 20, 21])
    supervised = torch.tensor([False] * 6 + [True] * 2)
    one = Encoded(ids, supervised, Origin("s", "f", 1))

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad(), tiny.attention("sdpa"):
            return tiny.network(ids[None]).logits[0, 5:7].double().log_softmax(-1)

    now = log_probabilities()
    with tiny.as_of(parent):
        then = log_probabilities()
    wanted = float((now.exp() * (now - then)).sum())
    (value, tokens) = kl_per_sequence(tiny, parent, [one])[0]
    assert (value, tokens) == pytest.approx((wanted, 2), abs=1e-4)
    backwards = float((then.exp() * (then - now)).sum())
    assert kl_per_sequence(tiny, parent, [one], reverse=True)[0][0] == pytest.approx(
        backwards, abs=1e-4
    )
