"""B07, the whole run: rows that the template cannot take are counted; all of them stop it."""

from __future__ import annotations

import pytest
from tests.pipeline.fixtures import lean, one_measurement, saved_base, work  # noqa: F401
from tests.pipeline.small import go, lora_recipe, read, stage, write_recipe, write_rows

from lehr.errors import RecipeError

STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must take turns') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INVALID = {2, 3, 5, 11, 17, 23, 29}

pytestmark = pytest.mark.usefixtures("lean")


def rows(invalid: set[int]) -> list[dict]:
    def row(n: int) -> dict:
        user = {"role": "user", "content": f"Which {n}?"}
        return {
            "messages": [user] * (1 + (n in invalid))
            + [{"role": "assistant", "content": "It is red."}]
        }

    return [row(n) for n in range(1, 31)]


def recipe() -> dict:
    made = lora_recipe(gates="none", export="adapter", template="strict.jinja")
    made["data"] = {"chats": {"path": "turns.jsonl", "holdout": 0}}
    keys = stage("chats", epochs=1)
    del keys["max_updates"]
    return made | {"stages": [{"sft": keys}]}


def test_seven_of_thirty(work):  # noqa: F811
    (work / "strict.jinja").write_text(STRICT)
    write_rows(work / "turns.jsonl", rows(INVALID))
    ledger, out, heard = go(write_recipe(work, recipe()))
    [source] = ledger.stages[0]["data"]
    assert (source["rows"], source["kept"], sum(source["dropped"].values())) == (30, 23, 7)
    [audited] = read(out / "01-sft" / "audit.json")["sources"]
    [(reason, entry)] = audited["dropped"].items()
    assert "Roles must take turns" in reason and entry["first"].endswith("turns.jsonl:2")
    assert heard.of("data")[0].data["sources"][0]["dropped"] == audited["dropped"]
    assert ledger.stages[0]["updates"] == 4, "23 rows in batches of 6"


def test_all_invalid_is_no_success(work):  # noqa: F811
    (work / "strict.jinja").write_text(STRICT)
    write_rows(work / "turns.jsonl", rows(set(range(1, 31))))
    with pytest.raises(RecipeError, match="30 of 30 rows were dropped") as caught:
        go(write_recipe(work, recipe()))
    assert caught.value.exit_status == 2
    out = work / "out"
    assert not (out / "model").exists() and not (out / "ledger.json").exists()
