"""The parameter `group` of a request, in a JSON body or in a query."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from starlette.datastructures import QueryParams

from tailrace.edge.generate.grouping import MAX_GROUP_CHARS, MAX_GROUP_MS, Grouping
from tailrace.ledger.errors import CallerError
from tailrace.ledger.text_units import Unit
from tailrace.ledger.validation import first_fault

UnitWord = Literal["word", "phrase", "sentence", "paragraph"]
WORDS: tuple[UnitWord, ...] = get_args(UnitWord)
QUERY_NAMES = {"by": "group", "ms": "group_ms", "chars": "group_chars"}
"""Maps each field of `GroupBody` to its parameter in a query."""
_NUMBER = re.compile(r"[0-9]{1,20}")


class GroupBody(BaseModel):
    """The field `group`: when the text of consecutive frames is sent, joined into one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    by: UnitWord | None = Field(None, description="one of " + ", ".join(WORDS))
    ms: int | None = Field(
        None,
        ge=1,
        le=MAX_GROUP_MS,
        description=f"an integer from 1 to {MAX_GROUP_MS}: text waits at most this long",
    )
    chars: int | None = Field(
        None,
        ge=1,
        le=MAX_GROUP_CHARS,
        description=f"an integer from 1 to {MAX_GROUP_CHARS}: text is sent at this length",
    )

    @model_validator(mode="after")
    def _groups_by_something(self) -> Self:
        if self.by is None and self.ms is None and self.chars is None:
            raise ValueError("give by, ms or chars")
        return self

    def to_grouping(self) -> Grouping:
        """Return the choice with the defaults of the fields that were left out."""
        return Grouping(
            None if self.by is None else Unit(self.by),
            MAX_GROUP_MS if self.ms is None else self.ms,
            MAX_GROUP_CHARS if self.chars is None else self.chars,
        )


def _as_object(value: object) -> object:
    """Return the object form of `group`; a word such as "sentence" stands for its `by`."""
    if not isinstance(value, str):
        return value
    if value not in WORDS:
        raise ValueError("not a unit of text")
    return {"by": value}


GroupField = Annotated[
    GroupBody | None,
    BeforeValidator(_as_object, json_schema_input_type=GroupBody | UnitWord | None),
]
"""The type of the field `group` in a request's body."""
GROUP: Any = Field(
    None,
    description='"word", "phrase", "sentence" or "paragraph", or an object such as'
    ' {"by": "sentence", "ms": 200, "chars": 80}',
)


def grouping_of(body: GroupBody | None) -> Grouping | None:
    """Return the choice in a request's body, or None if the text is not to be grouped."""
    return None if body is None else body.to_grouping()


def parse_group(query: QueryParams) -> Grouping | None:
    """Return the choice in a query: `group`, `group_ms`, `group_chars`; None without any of them.

    Raises CallerError if a value is not valid, or if a parameter is repeated.
    """
    document: dict[str, int | str] = {}
    for field, name in QUERY_NAMES.items():
        values = query.getlist(name)
        if len(values) > 1:
            raise CallerError(f"{name} is repeated", field=name, hint=f"send one {name}")
        for text in values:
            is_number = field != "by" and _NUMBER.fullmatch(text) is not None
            document[field] = int(text) if is_number else text
    if not document:
        return None
    try:
        return GroupBody.model_validate(document).to_grouping()
    except ValidationError as error:
        fault = first_fault(error, GroupBody)
        name = QUERY_NAMES[fault.field]
        raise CallerError(f"{name}: {fault.message}", field=name, hint=fault.right) from None
