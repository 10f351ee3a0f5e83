"""An unknown key of guard is a refusal that says what it may be, not a traceback."""

from lehr.recipe.suggestions import explain_unknown


def test_an_unknown_key_of_guard_is_explained():
    assert "window" in explain_unknown("windw", "guard", {}, "sft")
