"""Validates an admin request: its method, query parameters and body."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ValidationError

from tailrace.ledger.errors import CallerError
from tailrace.ledger.validation import invalid_document

T = TypeVar("T", bound=BaseModel)
Document = dict[str, Any]


def require(method: str, wanted: str) -> None:
    """Raise CallerError (405) unless the request's method is the wanted one."""
    if method != wanted:
        raise CallerError("method not allowed", code="method_not_allowed", status=405, hint=wanted)


def parse_body(kind: type[T], body: bytes) -> T:
    """Parse a JSON body. Raises CallerError that names the invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_document(error, whole="body") from None


class Query:
    """The query parameters of a request.

    `text`, `word`, `number` and `flag` remove one parameter and return its value. `done` is called
    last and refuses the parameters that are left.
    """

    def __init__(self, url: str) -> None:
        pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
        self._given = dict(pairs)
        if len(self._given) < len(pairs):
            raise CallerError("a parameter is given twice", field="query")

    def text(self, name: str, default: str = "") -> str:
        return self._given.pop(name, default)

    def word(self, name: str, words: Collection[str], default: str) -> str:
        text = self.text(name, default)
        if text != default and text not in words:
            hint = "one of " + ", ".join(words)
            raise CallerError(f"{text!r} is not valid", field=name, hint=hint)
        return text

    def number(self, name: str, default: int, most: int, least: int = 0) -> int:
        text = self.text(name, str(default))
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            hint = f"a number from {least} to {most}"
            raise CallerError(f"{text!r} is not valid", field=name, hint=hint)
        return int(text)

    def flag(self, name: str) -> bool:
        return self.word(name, ("0", "1"), "0") == "1"

    def rest(self) -> dict[str, str]:
        """Remove and return all parameters that are left; the caller must check their names."""
        given, self._given = self._given, {}
        return given

    def done(self) -> None:
        """Raise CallerError if a parameter is left: no method has read it, so it is unknown."""
        for name in self._given:
            raise CallerError("unknown query parameter", code="unknown_field", field=name)
