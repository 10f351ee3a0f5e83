"""Which prompts a person is shown."""

from __future__ import annotations

from tests.pipeline.small import lora_recipe, write_recipe

from lehr.pipeline.showcase import shown_prompts
from lehr.pipeline.sources import read_all
from lehr.recipe.loading import load_recipe


def test_a_held_out_question_of_the_runs_own_data_comes_first(work):
    recipe = load_recipe(write_recipe(work, lora_recipe(show=[])))
    sources = read_all(recipe)
    shown = shown_prompts(recipe, sources)
    held_out = {example.messages[0]["content"] for example in sources["chats"].heldout}
    assert [one.kind for one in shown] == ["held out", "forbidden", "look-alike", "false claim"]
    assert shown[0].prompt in held_out and len(shown[0].messages) == 1
    assert len(shown[0].prompt) == min(map(len, held_out))
    asked = load_recipe(write_recipe(work, lora_recipe(show=["And now?"])))
    assert [one.prompt for one in shown_prompts(asked, sources)] == ["And now?"]
