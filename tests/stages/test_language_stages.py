"""pretrain and sft: which tokens are trained, replay, and what the second stage begins from."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.small import (
    go,
    lora_recipe,
    metrics,
    read,
    save_base,
    stage,
    weights_recipe,
    write_data,
    write_recipe,
)

pytestmark = pytest.mark.usefixtures("lean")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: Any, saved_base: Any) -> Any:
    folder = tmp_path_factory.mktemp("language")
    write_data(folder)
    recipe = weights_recipe(gates="none", export="merged")
    recipe["stages"] = [
        {"pretrain": stage("text", learning_rate=5e-3, max_updates=12)},
        {"sft": stage("chats", learning_rate=5e-3, keep={"replay": {"text": 0.4}})},
    ]
    return go(write_recipe(folder, recipe))


def test_pretraining_trains_every_token_but_the_first(ran):
    _, out, _ = ran
    for row in metrics(out / "01-pretrain"):
        documents = row["tokens"] - row["supervised_tokens"]
        assert documents in (6, 2), "the first token of each document (50 = 8 x 6 + 2)"


def test_sft_trains_answers_only_and_replay_beside_them(ran):
    _, out, _ = ran
    audit = read(out / "02-sft" / "audit.json")
    by_name = {one["name"]: one for one in audit["sources"]}
    chats, text = by_name["chats"], by_name["text"]
    assert chats["supervised_tokens"] < 0.4 * chats["tokens"]
    assert text["supervised_tokens"] > 0.9 * text["tokens"]
    spans = [span["text"] for span in audit["mask_sample"] if span["supervised"]]
    assert "".join(spans).startswith("It is ") and "<|im_end|>" in "".join(spans)


def test_the_second_stage_begins_where_the_first_ended(ran):
    _, out, _ = ran
    first, second = (metrics(out / name) for name in ("01-pretrain", "02-sft"))
    assert first[-1]["loss"] < 0.8 * first[0]["loss"]
    assert second[-1]["loss"] < second[0]["loss"]


def test_rows_of_a_template_train_under_an_adapter_after_pretraining_of_all_weights(work):
    """Plain text uses none of the template's tokens: they are as untrained as at the start."""
    recipe = weights_recipe(gates="none", export="merged", adapter={"kind": "lora", "rank": 4})
    recipe["stages"] = [
        {"pretrain": stage("text", max_updates=2)},
        {"sft": stage("chats", max_updates=2)},
        {"sft": stage("chats", name="again", max_updates=2)},
    ]
    _, out, _ = go(write_recipe(work, recipe))
    config = read(out / "02-sft" / "adapter" / "adapter_config.json")
    assert next(iter(config["trainable_token_indices"].values())), "else it never learns to stop"
    again = read(out / "03-again" / "adapter" / "adapter_config.json")
    assert again["trainable_token_indices"] == config["trainable_token_indices"]


def test_rows_of_a_template_that_chats_have_trained_are_ordinary(work):
    recipe = weights_recipe(gates="none", export="merged", adapter={"kind": "lora", "rank": 4})
    recipe["stages"] = [
        {"sft": stage("chats", max_updates=2)},
        {"sft": stage("chats", name="again", max_updates=2)},
    ]
    _, out, _ = go(write_recipe(work, recipe))
    config = read(out / "02-again" / "adapter" / "adapter_config.json")
    assert not config.get("trainable_token_indices")


def test_a_base_folder_with_a_new_template_trains_its_rows(work):
    save_base(work / "plain", template="auto")
    recipe = lora_recipe(gates="none", export="adapter", model="./plain", template="chatml")
    recipe["stages"] = recipe["stages"][:1]
    _, out, _ = go(write_recipe(work, recipe))
    config = read(out / "01-sft" / "adapter" / "adapter_config.json")
    assert next(iter(config["trainable_token_indices"].values()))
