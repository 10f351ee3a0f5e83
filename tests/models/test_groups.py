"""Groups of answers that share a prompt: the numbers and gradients of one answer a row."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, network_of

import oracle
from lehr.data.groups import group_of, split_group
from lehr.data.packing import merge, pack, single
from lehr.data.shapes import Encoded, Origin, Pack
from lehr.errors import LehrError
from lehr.generation.groups import sample_groups
from lehr.models.language_model import LanguageModel
from lehr.objectives.policy import Policy, Samples, group_advantages, weighted

ORIGIN = Origin("prompts", "prompts.jsonl", 1)


def group(prompt: int, *answers: int, seed: int = 0) -> Encoded:
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=generator).tolist()

    return group_of(some(prompt), [some(count) for count in answers], ORIGIN)


# The second group's answers are longer than the windows of Mistral and Gemma.
GROUPS = [group(9, 4, 1, 6, 4, 4), group(2, 8, 7, 1, seed=1)]


def losses(model: LanguageModel, packs: list[Pack]) -> torch.Tensor:
    """Log-probabilities of all answers' tokens, in the order of groups and answers."""
    found: dict[int, list[torch.Tensor]] = {}
    for one in packs:
        stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
        items = torch.tensor(one.items)[one.sequence_example[one.sequence]]
        for item in dict.fromkeys(one.items):
            found.setdefault(item, []).append(stats.log_probability[items == item])
    return torch.cat([part for item in sorted(found) for part in found[item]])


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_equal_one_answer_a_row_with_gradients(family: str) -> None:
    network = network_of(family)
    parameters = dict(network.named_parameters())
    rows = oracle.rows_of(GROUPS)
    wanted = torch.cat(oracle.log_probabilities(network, rows))
    model = LanguageModel(network, None, family)
    model.train_all()
    weight = torch.linspace(-1, 1, len(wanted))
    expected = oracle.gradients((wanted * weight).sum(), parameters)
    total = torch.cat([one.flatten() for one in expected.values()]).norm()
    cut = [(i, part) for i, one in enumerate(GROUPS) for part in split_group(one, 20)]
    assert len(cut) > len(GROUPS)
    for packs in (pack(list(enumerate(GROUPS)), 100), [merge([single(*one) for one in cut])]):
        found = losses(model, packs)
        assert (found - wanted).abs().max() < 1e-5
        gradients = oracle.gradients((found * weight).sum(), parameters)
        for name in parameters:
            apart = (gradients[name] - expected[name]).norm()
            assert apart < 1e-5 * max(expected[name].norm(), 1e-3 * total), name


def test_an_answer_does_not_see_its_siblings() -> None:
    model = LanguageModel(network_of("Llama"), None, "Llama")
    one = single(0, GROUPS[0])
    before = losses(model, [one])
    ids = one.ids.clone()
    ids[10] = 3 if int(ids[10]) != 3 else 4  # in the first answer
    changed = Pack(**{**one.__dict__, "ids": ids})
    after = losses(model, [changed])
    assert not torch.equal(before[:4], after[:4])
    assert torch.equal(before[4:], after[4:])


def test_one_update_from_sampling_to_gradients() -> None:
    """Samples of the decode engine, their log-probabilities, and the oracle's policy gradient."""
    network = network_of("Llama")
    parameters = dict(network.named_parameters())
    model = LanguageModel(network, None, "Llama")
    model.train_all()
    prompts = [[5, 6, 7, 8], [9, 3]]
    written = sample_groups(model, prompts, 4, max_new_tokens=6, stop_ids={11, 40}, seed=3)
    ids = [[one.ids for one in group] for group in written]
    assert len({tuple(one) for group in ids for one in group}) > 4
    assert len({len(one) for group in ids for one in group}) > 1
    rewards = torch.tensor([[float(sum(one) % 5) for one in group] for group in ids])
    advantages = group_advantages(rewards).values
    groups = [
        group_of(prompt, answers, ORIGIN) for prompt, answers in zip(prompts, ids, strict=True)
    ]
    packs = pack(list(enumerate(groups)), 64)
    decoded = [torch.tensor(one.log_probabilities) for group in written for one in group]
    assert (losses(model, packs) - torch.cat(decoded)).abs().max() < 1e-4
    objective = Policy({i: Samples(a.tolist()) for i, a in enumerate(advantages)})
    one = weighted(merge(packs), "group")
    loss = objective.loss(model, one).total / objective.weight(one)
    found = oracle.gradients(loss, parameters)
    rows = oracle.log_probabilities(network, oracle.rows_of(groups))
    plain = torch.zeros(())
    for index, answers in enumerate(ids):
        tokens = sum(map(len, answers))
        for branch in range(4):
            plain = plain - advantages[index, branch] * rows[4 * index + branch].sum() / tokens / 2
    expected = oracle.gradients(plain, parameters)
    for name in parameters:
        assert oracle.relative_gap(found[name], expected[name]) < 1e-5, name


def test_samples_that_cannot_differ_are_refused() -> None:
    model = LanguageModel(network_of("Llama"), None, "Llama")
    with pytest.raises(LehrError, match="samples must differ"):
        sample_groups(model, [[5]], 2, max_new_tokens=2, stop_ids=set(), temperature=0.0)
    with pytest.raises(LehrError, match="at least 2 a prompt"):
        sample_groups(model, [[5]], 1, max_new_tokens=2, stop_ids=set())
