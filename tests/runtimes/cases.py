"""The table of `tests/vectors/http_cases.json`: a request, and what any runtime answers to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "vectors" / "http_cases.json"
_PLACE = re.compile(r"\{\{([^{}*]+)(?:\*(\d+))?\}\}")
Values = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose placeholders are filled in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, with names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Case:
    """A row of the table."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.name: str = row["name"]
        self.versions: list[str] = row.get("versions", ["1.1", "2", "3"])
        self._row = row

    def request(self, values: Values) -> Request:
        asked = filled(self._row["request"], values)
        headers = asked.get("headers", {})
        body = None
        if "hex" in asked:
            body = bytes.fromhex(asked["hex"])
        elif "text" in asked:
            body = asked["text"].encode()
        elif "json" in asked:
            body = json.dumps(asked["json"], ensure_ascii=False).encode()
            headers = {"Content-Type": "application/json"} | headers
        return Request(asked["method"], asked["path"], headers, body)

    def faults(self, answer: Answer, values: Values) -> list[str]:
        """Return what of the answer is not as the row says, in words."""
        wanted = filled(self._row["answer"], values)
        headers = wanted.get("headers", {}) | (ERROR_HEADERS if "error" in wanted else {})
        found = _differences("header ", headers, answer.headers)
        if answer.status != wanted["status"]:
            found.append(f"status {answer.status}, not {wanted['status']}")
        if "text" in wanted and answer.body != wanted["text"].encode():
            found.append("another body")
        if "error" in wanted:
            came = _document(answer).get("error")
            came = came if isinstance(came, dict) else {}
            found += _differences("error.", dict.fromkeys(came) | wanted["error"], came)
        found += _differences("", wanted.get("json", {}), _document(answer))
        return [*found, answer.body[:500].decode(errors="replace")] if found else []


ERROR_HEADERS = {
    "content-type": "application/json",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
"""Headers of every error response."""


def _document(answer: Answer) -> dict[str, Any]:
    try:
        document = json.loads(answer.body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _differences(what: str, wanted: Mapping[str, Any], came: Mapping[str, Any]) -> list[str]:
    return [
        f"{what}{name}: {came.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if not _is(value, came.get(name))
    ]


def _is(wanted: object, came: object) -> bool:
    """Return True if `came` is as wanted; after a text that ends in `…` the runtimes may differ."""
    if isinstance(wanted, str) and wanted.endswith("…") and isinstance(came, str):
        return came.startswith(wanted[:-1])
    return wanted == came


def filled(said: Any, values: Values) -> Any:
    """`{{name}}` is a value, `{{x*900000}}` so many of what is before the star."""
    if isinstance(said, dict):
        return {name: filled(one, values) for name, one in said.items()}
    if isinstance(said, list):
        return [filled(one, values) for one in said]
    if not isinstance(said, str):
        return said
    if (whole := _PLACE.fullmatch(said)) and whole[2] is None:
        return values[whole[1]]

    def put(place: re.Match[str]) -> str:
        name, count = place.groups()
        return str(values[name]) if count is None else name * int(count)

    return _PLACE.sub(put, said)


def table() -> list[Case]:
    return [Case(row) for row in json.loads(TABLE.read_text("utf-8"))["cases"]]
