"""Findings: each planted defect is found once, and clean data has none."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from lehr.data.audit import LONG_CHARACTERS, Finding, findings
from lehr.data.near_duplicates import jaccard, near_duplicates, prints_of, runs_of
from lehr.data.shapes import Encoded, Example, Message, Origin


def words(seed: int, count: int = 40) -> str:
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghijkl", k=6)) for _ in range(count))


def at(line: int, source: str = "s") -> Origin:
    return Origin(source, "f", line)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def chat(line: int, question: str, answer: str) -> Example:
    return Example("chat", at(line), messages=(user(question), assistant(answer)))


def pair(line: int, question: str, chosen: str, rejected: str) -> Example:
    return Example(
        "pair",
        at(line),
        messages=(user(question),),
        chosen=(assistant(chosen),),
        rejected=(assistant(rejected),),
    )


def found(
    examples: Sequence[Example],
    heldout: Mapping[str, Sequence[Example]] | None = None,
) -> dict[str, Finding]:
    listed = findings({"s": examples}, None, heldout)
    assert len({finding.kind for finding in listed}) == len(listed)
    return {finding.kind: finding for finding in listed}


CLEAN = [chat(n, words(2 * n), words(2 * n + 1)) for n in range(100)]


def test_clean_data_has_no_findings() -> None:
    assert found(CLEAN, {"s": [chat(200, words(1001), words(1002))]}) == {}


def test_exact_and_near_duplicates_and_overlap() -> None:
    near = words(0) + " but with one more clause"
    rows = [*CLEAN, chat(101, words(0), words(1)), chat(102, near, words(1))]
    listed = found(rows)
    assert listed["exact duplicate"].examples == ["f:101"]
    assert listed["near duplicate"].examples == ["f:102"]
    overlap = found(CLEAN, {"s": [chat(102, near, words(1)), chat(103, words(501), words(502))]})
    assert overlap["near overlap of train and held-out"].count == 1
    assert overlap["near overlap of train and held-out"].examples == ["f:102"]


def test_a_shared_system_message_makes_no_duplicates() -> None:
    system: Message = {"role": "system", "content": words(7, 400)}
    rows = [
        Example("chat", at(n), messages=(system, user(words(n, 8)), assistant(words(-n, 8))))
        for n in range(1, 30)
    ]
    assert found(rows) == {}


def test_pairs() -> None:
    rows = [pair(n, words(n), words(n + 500), words(n + 900)) for n in range(1, 31)]
    assert found(rows) == {}
    rows.append(pair(31, words(31), "same", "same"))
    rows.append(pair(32, words(1), words(901), words(501)))
    listed = found(rows)
    assert listed["identical pair"].examples == ["f:31"]
    assert listed["contradicting pair"].examples == ["f:32"]


def test_length_bias_needs_both_size_and_certainty() -> None:
    def rows(longer: int, shorter: int) -> list[Example]:
        return [
            pair(n, words(n), words(n + 500, 9 if n < longer else 3), words(n + 900, 6))
            for n in range(longer + shorter)
        ]

    finding = found(rows(40, 10))["length bias"]
    assert finding.count == 40
    assert "longer one in 80% of 50 pairs" in finding.sentence
    assert "shorter one" in found(rows(10, 40))["length bias"].sentence
    assert "length bias" not in found(rows(28, 22))
    assert "length bias" not in found(rows(10, 0))


def test_conflicts() -> None:
    rows = [*CLEAN, chat(101, words(0), "another answer")]
    assert found(rows)["several answers to one prompt"].examples == ["f:101"]
    labelled = [
        Example(
            "labelled", at(n), messages=(user("q"),), chosen=(assistant("a"),), label=bool(n % 2)
        )
        for n in (1, 2)
    ]
    assert found(labelled)["label conflict"].examples == ["f:2"]


def test_single_rows() -> None:
    two_users = Example("chat", at(3), messages=(user(words(3)), user(words(4)), assistant("a b")))
    listed = found(
        [
            chat(1, "", words(1)),
            chat(2, words(2) + " <|im_end|>", words(20)),
            two_users,
            Example("text", at(4), text=words(5, 3) * (LONG_CHARACTERS // 10)),
            chat(5, "is 1 < 2 | 3 > 2 ?", words(6)),
        ]
    )
    assert {kind: finding.examples for kind, finding in listed.items()} == {
        "empty turn": ["f:1"],
        "text that looks like a control token": ["f:2"],
        "two turns of one role in a row": ["f:3"],
        "long row": ["f:4"],
    }


def test_rows_in_two_sources_and_rows_without_supervision() -> None:
    encoded = Encoded(torch.arange(3), torch.zeros(3, dtype=torch.bool), at(9))
    listed = findings({"a": CLEAN, "b": CLEAN[:2]}, {"a": [encoded]})
    assert [(f.kind, f.source, f.count) for f in listed] == [
        ("in two sources", "b", 2),
        ("nothing to learn", "a", 1),
    ]


def test_examples_are_at_most_five_and_never_quote() -> None:
    rows = [chat(n, "SECRET", "SECRET") for n in range(9)]
    entry = found(rows)["exact duplicate"].as_json()
    assert entry["count"] == 8
    assert len(entry["examples"]) == 5
    assert "SECRET" not in str(entry)
    assert entry["sentence"].startswith("8 rows ")


def test_jaccard_by_hand() -> None:
    # Runs of three: abc bcd cde against abc bcd cdx: two of four.
    assert jaccard(runs_of("a b c d e"), runs_of("a b c d x")) == 0.5
    assert jaccard(runs_of(""), runs_of("")) == 1.0


def test_near_duplicates_are_those_of_the_exact_test() -> None:
    texts = []
    for n in range(60):
        kept = 40 - n % 20
        texts += [words(n), " ".join([*words(n).split()[:kept], *words(n + 999).split()[kept:]])]
    prints = prints_of(texts)
    truth = {
        later
        for later in range(len(texts))
        for earlier in range(later)
        if jaccard(prints[later].runs, prints[earlier].runs) >= 0.8
    }
    reported = {later for later, _ in near_duplicates(prints)}
    assert reported <= truth
    assert len(reported) >= 0.9 * len(truth) > 5
    # Scripts without spaces are compared by the character.
    chinese = [
        "\u6211\u4eec\u4eca\u5929\u4e00\u8d77\u53bb\u5317\u4eac\u770b\u957f\u57ce\u5427\u597d\u5417"
    ]
    assert len(runs_of(chinese[0])) == len(chinese[0]) - 2
