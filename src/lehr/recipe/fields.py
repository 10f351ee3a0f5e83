"""Types of recipe values: numbers that are never booleans, words that are never numbers.

YAML and the command line hand over text, numbers and booleans in several spellings.
What a value may be is said once, here and by the bounds in `schema`; the sentence
that a user reads ("a number above 0") is made from the same declaration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

NOTHING = ("none", "None", "null", "~")


def refused(expected: str) -> PydanticCustomError:
    """The error of a validator that says by itself what was expected."""
    return PydanticCustomError("expected", "{expected}", {"expected": expected})


class Section(BaseModel):
    """A part of the recipe: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,  # an import costs nothing; the first recipe builds the validators
    )


def as_number(value: Any) -> Any:
    """Text that spells a number becomes that number; a boolean never does.

    >>> as_number("1e-5"), as_number("1_000"), as_number(True)
    (1e-05, 1000.0, 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d_]*\.?[\d_]*([eE][-+]?\d+)?", value):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def as_whole(value: Any) -> Any:
    """As `as_number`, for counts: 1e3 is 1000, and 1.5 stays 1.5 to be refused."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*", value):
        return _int(value)
    value = as_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _int(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:  # beyond the interpreter's limit of digits
        return text


def as_truth(value: Any) -> Any:
    """ "false" is False; numbers other than 0 and 1 are no truth value."""
    return value.strip() if isinstance(value, str) else value


def as_nothing(value: Any) -> Any:
    """ "none" and its spellings are null where null is allowed."""
    return None if isinstance(value, str) and value in NOTHING else value


def as_default(value: Any) -> Any:
    """ "default" is null where null stands for a default that is found later."""
    return None if value == "default" else value


def as_decay(value: Any) -> Any:
    """A number stands for an average with that decay; "none" and its spellings for none."""
    number = as_number(as_nothing(value))
    return {"decay": value} if isinstance(number, int | float) else number


def as_scale(value: Any) -> Any:
    """A number stands for a loss scale that begins there; "none" and its spellings for none."""
    number = as_number(as_nothing(value))
    return {"init": value} if isinstance(number, int | float) else number


def as_scaling(value: Any) -> Any:
    """A word stands for FP8 with that scaling; true is refused with the key that is meant."""
    if value is True:
        raise refused("precision: fp8 to switch it on; fp8 holds its settings")
    if value is False:
        return None
    value = as_nothing(value)
    return {"scaling": value} if isinstance(value, str) else value


def as_guard(value: Any) -> Any:
    """false is the policy off; null says nothing, so it is refused."""
    if value is None or value is True:
        raise refused("rewind, skip, stop or off, or a mapping with policy")
    return {"policy": "off"} if value is False else value


def as_recompute(value: Any) -> Any:
    """null is the word none; a mapping holds a budget above 0 and below 1."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        share = as_number(value.get("budget"))
        if set(value) != {"budget"} or not isinstance(share, int | float) or not 0 < share < 1:
            raise refused(
                "none, full, selective, auto, or {budget: share} with a share above 0 and below 1 "
                "of the bytes that none keeps"
            )
    return value


def as_list(value: Any) -> Any:
    """One item stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _word(value: str) -> str:
    if not value.strip() or "\x00" in value:
        raise refused("text that is not empty")
    return value


def _device(value: str) -> str:
    if value == "mps":
        raise refused(
            "auto, cpu, cuda or cuda:N (Apple's mps has no float64, which sums need here)"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise refused("auto, cpu, cuda, or cuda:N with the number of a card, as in cuda:0")
    return value


def _power_of_two(value: float) -> float:
    if not math.isfinite(value) or value <= 0 or math.frexp(value)[0] != 0.5:
        raise refused("a power of two, such as 65536: then scaling is exact")
    return value


def _whole_from_one(value: float) -> float:
    if value >= 1 and value != int(value):
        raise refused("a share below 1, or a whole number of updates")
    return value


def _at_most(limit: int) -> Callable[[float], float]:
    """A bound so far away that it is said only to who went past it."""

    def check(value: float) -> float:
        if value > limit:
            raise refused(f"at most {limit:,}: no machine gets further")
        return value

    return check


# Bounds stand inside the conversion, so that the JSON Schema shows them.
Number = Annotated[float, BeforeValidator(as_number)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(as_number)]
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(as_number)]
PowerOfTwo = Annotated[
    float, Field(gt=0), AfterValidator(_power_of_two), BeforeValidator(as_number)
]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(as_number)]
PartialShare = Annotated[float, Field(gt=0, lt=1), BeforeValidator(as_number)]
BelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(as_number)]
ShareOrUpdates = Annotated[
    float, Field(ge=0), AfterValidator(_whole_from_one), BeforeValidator(as_number)
]
Whole = Annotated[int, BeforeValidator(as_whole)]
Rows = Annotated[int, Field(ge=0), AfterValidator(_at_most(10**9)), BeforeValidator(as_whole)]
# A number of rows, updates or tokens that no machine gets through is a slip of the hand.
LARGEST = 10**9
Count = Annotated[int, Field(ge=1), AfterValidator(_at_most(LARGEST)), BeforeValidator(as_whole)]
Several = Annotated[int, Field(ge=2), AfterValidator(_at_most(LARGEST)), BeforeValidator(as_whole)]
Window = Annotated[int, Field(ge=32), AfterValidator(_at_most(LARGEST)), BeforeValidator(as_whole)]
Threads = Annotated[int, Field(ge=1), AfterValidator(_at_most(1024)), BeforeValidator(as_whole)]
Updates = Annotated[int, Field(ge=1), AfterValidator(_at_most(10**7)), BeforeValidator(as_whole)]
Length = Annotated[int, Field(ge=2), AfterValidator(_at_most(10**8)), BeforeValidator(as_whole)]
Epochs = Annotated[float, Field(gt=0), AfterValidator(_at_most(10**6)), BeforeValidator(as_number)]
Truth = Annotated[bool, BeforeValidator(as_truth)]
Text = Annotated[str, AfterValidator(_word)]
DeviceName = Annotated[str, AfterValidator(_device)]
Name = Annotated[str, Field(pattern=r"^[\w-]+$")]
AutoCount = Literal["auto"] | Count
AutoThreads = Literal["auto"] | Threads


def describe(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a JSON Schema allows, as a phrase for people.

    >>> describe({"type": "number", "exclusiveMinimum": 0}, {})
    'a number above 0'
    >>> describe({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}, {})
    'auto or a whole number, at least 1'
    """
    if "$ref" in schema:
        return describe(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe(s, definitions) for s in schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(str(word) for word in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = str(schema.get("type"))
    if kind in ("number", "integer"):
        return _describe_number(schema, "a number" if kind == "number" else "a whole number")
    if kind == "array":
        return _describe_array(schema, definitions)
    if kind == "object" and "properties" in schema:
        return "a mapping with the keys " + ", ".join(schema["properties"])
    if kind == "object":
        inner = schema.get("additionalProperties")
        of = f" of name: {describe(inner, definitions)}" if isinstance(inner, Mapping) else ""
        return f"a mapping{of}"
    if kind == "string" and schema.get("format") != "path":
        return "a name of letters, digits, _ and -" if "pattern" in schema else "text"
    return {"boolean": "true or false", "null": "none", "string": "a path"}.get(kind, "a value")


def _describe_number(schema: Mapping[str, Any], noun: str) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:g}"
    parts = [
        f"above {above:g}" if above is not None else "",
        f"at least {low:g}" if low is not None else "",
        f"below {below:g}" if below is not None and below < 2**62 else "",
        f"at most {high:g}" if high is not None else "",
    ]
    limits = " and ".join(part for part in parts if part)
    separator = ", " if low is not None else " "
    return f"{noun}{separator}{limits}" if limits else noun


def _describe_array(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        items = ", ".join(describe(item, definitions) for item in schema["prefixItems"])
        return f"a list of {len(schema['prefixItems'])} values ({items})"
    inner = schema.get("items")
    return "a list of " + describe(inner, definitions) if isinstance(inner, Mapping) else "a list"
