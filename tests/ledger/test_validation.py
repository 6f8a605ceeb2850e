"""Messages for invalid documents."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.ledger.errors import CallerError
from tailrace.ledger.validation import MAX_SHOWN_CHARS, first_fault, invalid_document


class Turn(BaseModel):
    """A document within another one."""

    model_config = ConfigDict(extra="forbid")

    role: Annotated[str, Field(min_length=1, alias="from", description="a role")]
    parts: list[int] = []


class Body(BaseModel):
    """A document with every kind of field that is described."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="a name")
    turns: list[Turn] | None = None
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    limits: dict[str, Annotated[int, Field(ge=0)]] = {}
    rate: Annotated[int, Field(ge=1)] = 1


def refused(document: Any) -> CallerError:
    with pytest.raises(ValidationError) as raised:
        Body.model_validate({"name": "a"} | document)
    return invalid_document(raised.value, Body, whole="body")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"name": 5}, "name: 5 is not valid (a name)"),
        ({"rate": 0}, "rate: 0 is not valid (must be greater than or equal to 1)"),
        ({"rate": "x"}, 'rate: "x" is not valid (must be a valid integer,'),
        ({"turns": [{}]}, "turns[0].from: this field is required (a role)"),
        ({"turns": [{"from": ""}]}, 'turns[0].from: "" is not valid (a role)'),
        ({"turns": [{"from": "a", "parts": [1, None]}]}, "turns[0].parts[1]: null is not valid"),
        ({"turns": [{"from": "a", "role": "b"}]}, "turns[0].role: unknown field"),
        ({"turns": ["a"]}, 'turns[0]: "a" is not valid (must be an object)'),
        ({"stop": 5}, "stop: 5 is not valid (a string or a list of strings)"),
        ({"limits": {"a": -1}}, "limits.a: -1 is not valid (must be greater than or equal to 0)"),
    ],
)
def test_a_fault_names_the_field_the_value_and_what_would_be_right(
    document: dict[str, Any], said: str
) -> None:
    error = refused(document)
    assert str(error).startswith(said)
    assert error.code == ("unknown_field" if "unknown" in said else "invalid_request")


def test_a_fault_of_the_whole_document_names_what_it_is() -> None:
    with pytest.raises(ValidationError) as raised:
        Body.model_validate_json(b"{")
    assert str(invalid_document(raised.value, whole="body")).startswith("body: Invalid JSON")


def test_a_value_is_cut_and_a_secret_one_is_not_shown() -> None:
    with pytest.raises(ValidationError) as raised:
        Body.model_validate({"name": "a", "rate": "9" * 10_000 + "x"})
    assert len(first_fault(raised.value).message) <= MAX_SHOWN_CHARS + len(" is not valid")
    assert first_fault(raised.value, shows_value=False).message == "the value is not valid"
