"""Items of pipelines as JSON, for the log of a stage that is not deterministic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from tailrace.origin.pipelines.speech.items import Speech, Transcript
from tailrace.origin.pipelines.stage import Item

T = TypeVar("T")


class _Holder(BaseModel, Generic[T]):
    """A model with one item, which sets that pydantic writes the item's bytes as base64."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    item: T


_HOLDERS: dict[str, type[_Holder[Any]]] = {
    kind.__name__: _Holder.__class_getitem__(kind)  # type: ignore[misc]
    for kind in (*get_args(Item), Speech, Transcript)
}


def items_json(items: Sequence[Item]) -> bytes:
    """Return items as one line of JSON."""
    named = [
        [name, _HOLDERS[name](item=item).model_dump(mode="json")["item"]]
        for item in items
        for name in [type(item).__name__]
    ]
    return json.dumps(named, separators=(",", ":")).encode() + b"\n"


def parsed_items(line: bytes) -> tuple[Item, ...]:
    """Return the items of a line that `items_json` has written.

    Raises:
        ValueError: The line has another form.
    """
    return tuple(
        _HOLDERS[name].model_validate_json(json.dumps({"item": fields})).item
        for name, fields in json.loads(line)
    )
