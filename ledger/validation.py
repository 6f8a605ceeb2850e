"""Converts pydantic's validation errors into errors of Tailrace, with one wording everywhere.

An error has the field, the refused value, and what would be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tailrace.ledger.errors import CallerError

Location = tuple[int | str, ...]
MAX_SHOWN_CHARS = 40
"""Maximum characters of a refused value in the message that refuses it."""
REQUIRED = "this field is required"
UNKNOWN = "unknown_field"
"""Code of an error about a field that does not exist."""
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
_SHOULD = re.compile(r"^\w+ should ")
"""Matches the beginning of pydantic's messages, such as `Input should be a valid integer`."""


class Fault(NamedTuple):
    """One fault in a document; `right` says what would be right.

    `field` is empty if the fault is about the whole document.
    """

    field: str
    message: str
    right: str | None
    kind: str
    """Pydantic's type of the error, such as `missing`."""
    value: object = None


def first_fault(
    error: ValidationError, model: type[BaseModel] | None = None, *, shows_value: bool = True
) -> Fault:
    """Return the first fault that pydantic has found.

    With a `model` the hint is the description of the faulty field. Without `shows_value` the
    message does not quote the value, which may be a secret.
    """
    return fault_of(error.errors(include_url=False)[0], model, shows_value=shows_value)


def fault_of(
    found: ErrorDetails, model: type[BaseModel] | None = None, *, shows_value: bool = True
) -> Fault:
    """Convert one of pydantic's errors into a `Fault`."""
    location, kind = found["loc"], found["type"]
    steps = [(part, None) for part in location] if model is None else list(_steps(model, location))
    described = next((info.description for _, info in reversed(steps) if info is not None), None)
    field = path_of([part for part, _ in steps])
    if kind == "missing":
        return Fault(field, REQUIRED, described, kind)
    reason = _SHOULD.sub("must ", found["msg"].removeprefix("Value error, "))
    if kind in _NOT_AN_OBJECT:
        reason = "must be an object"
    elif not location:  # the fault is about several fields, or the document is not JSON
        return Fault(field, reason, described, kind)
    value = shown(found["input"]) if shows_value else "the value"
    return Fault(field, f"{value} is not valid", described or reason, kind, found["input"])


def invalid_document(
    error: ValidationError,
    model: type[BaseModel] | None = None,
    *,
    code: str | None = None,
    whole: str | None = None,
    shows_value: bool = True,
) -> CallerError:
    """Return the error for the first fault in a caller's document.

    If the fault is about the whole document, the error names `whole` as its field.
    """
    fault = first_fault(error, model, shows_value=shows_value)
    if fault.kind == "extra_forbidden":
        return CallerError("unknown field", code=code or UNKNOWN, field=fault.field)
    return CallerError(fault.message, code=code, field=fault.field or whole, hint=fault.right)


def closest_name(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    `least` is the least similarity that counts: 0 for nothing in common, 1 for the same name.
    """
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=least)), None)


def unknown_field(location: Location, fields: Iterable[str]) -> CallerError:
    """Return the error for an unknown field at `location`; `fields` are the known names there."""
    known = list(fields)
    closest = closest_name(str(location[-1]), known)
    hint = f'did you mean "{closest}"?' if closest else "one of " + ", ".join(known)
    return CallerError("unknown field", code=UNKNOWN, field=path_of(location), hint=hint)


def path_of(location: Iterable[int | str]) -> str:
    """Return a location as a path: `("messages", 0, "role")` becomes `messages[0].role`."""
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(steps).removeprefix(".")


def shown(value: object) -> str:
    """Return a refused value as JSON, cut after MAX_SHOWN_CHARS characters."""
    # Encode only the pieces that are shown, because the value may have a megabyte.
    pieces = json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value)
    text = "".join(islice(pieces, MAX_SHOWN_CHARS))
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


# ---- which parts of a location are fields ----


def _steps(
    model: type[BaseModel], location: Location
) -> Iterator[tuple[int | str, FieldInfo | None]]:
    """Yield the parts of an error's location that are in the document.

    Each part comes with its field of the model, or None for an index of a list. A location from
    pydantic also names the branches of unions that pydantic has tried; these parts are left out.
    """
    at: Any = model
    for part in location:
        kinds = list(_branches(at))
        at = None
        for kind in kinds:
            info = _fields(kind).get(str(part))
            inner = get_args(kind)
            if info is not None:
                yield part, info
                at = info.annotation
            elif get_origin(kind) is dict and isinstance(part, str):
                yield part, None
                at = inner[1]
            elif isinstance(part, int) and inner:
                yield part, None
                at = inner[0]
            else:
                continue
            break
        else:
            if any(map(_fields, kinds)):  # the part is a field that none of the models has
                yield part, None
            else:  # the part is a branch of a union; indexes of its items may follow
                at = next((kind for kind in kinds if get_origin(kind) is list), None)


def _branches(annotation: object) -> Iterator[object]:
    """Yield the types that a value of an annotated type may have."""
    if get_origin(annotation) is Annotated:
        yield from _branches(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _branches(inner)
    elif annotation not in (None, type(None)):
        yield annotation


def _fields(kind: object) -> Mapping[str, FieldInfo]:
    """Return the fields of a model by the names that documents have for them."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    return {info.alias or name: info for name, info in kind.model_fields.items()}
