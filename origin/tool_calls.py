"""Tool calls in a model's text: how model families write them, and a reader for them.

A model that was trained to call tools writes its calls as text, in the markup of its family, which
its chat template shows. `CallReader` extracts them from the text. Its result depends on the text
alone, not on its division into pieces, except for where pieces end: so a continuation that feeds
the same text reaches the state of the interrupted run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tailrace.ledger.errors import CallerError

MAX_HEAD_CHARS = 1024
"""Maximum characters from the start of a call to its arguments; longer text is no call."""

MarkupName = Literal["hermes", "llama", "mistral"]


@dataclass(frozen=True, slots=True)
class Markup:
    """Markup around a call, `{"name": …, ARGUMENTS: {…}}`, and the name of its arguments.

    Without `ends` there may be several calls after one `begins`, with characters of `around`
    between. A tokenizer may have either mark as a special token. `id_chars` is the required length
    of an id.
    """

    begins: str
    ends: str
    arguments: str
    around: str = ""
    id_chars: int | None = None


MARKUPS: dict[MarkupName, Markup] = {
    "hermes": Markup("<tool_call>", "</tool_call>", "arguments"),  # Qwen uses the same marks
    "llama": Markup("", "", "parameters", ";"),  # no marks, just JSON
    "mistral": Markup("[TOOL_CALLS]", "", "arguments", "[,]", 9),
}


def markup_of(template: str) -> MarkupName | None:
    """Return a model's markup, from its chat template; None if it shows no known one."""
    if not shows_tools(template):
        return None
    if "<tool_call>" in template:
        return "hermes"
    if '"parameters": ' in template and ("ipython" in template or "python_tag" in template):
        return "llama"
    if re.search(r"\[TOOL_CALLS\] ?\[", template):  # later versions write no JSON list
        return "mistral"
    return None


def read_calls(text: str, field: str) -> list[dict[str, str]]:
    """Return the calls of a `Message`, each with `id`, `name`, `arguments`.

    Raises CallerError if they are malformed.
    """
    return _objects(text, field, ("id", "name", "arguments"))


def read_functions(text: str) -> list[dict[str, Any]]:
    """Return the functions of `Tools`. Raises CallerError if they are malformed."""
    functions = _objects(text, "tools", ("name",))
    for at, function in enumerate(functions):
        if not isinstance(function.setdefault("parameters", {}), dict | bool):
            raise CallerError("is no JSON schema", field=f"tools[{at}].parameters")
    return functions


def _objects(text: str, field: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    value = _decoded(text)
    if not isinstance(value, list):
        raise CallerError("is not the JSON of a list", field=field)
    for at, item in enumerate(value):
        for key in keys:
            if not isinstance(item, dict) or not isinstance(item.get(key), str):
                raise CallerError(f"has no {key}", field=f"{field}[{at}]")
    return value


def shows_tools(template: str) -> bool:
    """Return True if a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


class ToolUse(BaseModel):
    """Tools that a stream may call; `functions` is a JSON list, `choice` a name of `ToolChoice`.

    A text worker has no `markup`: its server knows how its model calls tools.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: str
    choice: str
    only: str | None = None
    parallel: bool = True
    markup: MarkupName | None = None

    @property
    def forced(self) -> bool:
        """True if the text must be calls only."""
        return self.choice == "required"


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of the `call`-th call: the first has its `name` only, the others arguments.

    An upstream server gives each call an `id`, which is in its first piece.
    """

    call: int
    name: str = ""
    arguments: str = ""
    id: str = ""

    @property
    def size(self) -> int:
        """Size in UTF-8 bytes; never 0."""
        return len(self.name.encode()) + len(self.arguments.encode())


_STRING = r'"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'
    + _STRING.replace("*)", "+)")
    + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_KEYS = ("name", "type", "arguments", "parameters", "function", "id")
_FIRST_KEY = re.compile(r"\s*\{\s*(?:" + _STRING + r"|([^\s\"]))")


class CallReader:
    """Separates text and calls. `calls` counts calls begun, `whole` completed ones."""

    def __init__(self, markup: MarkupName) -> None:
        self.calls = 0
        self.whole = 0
        self._markup = MARKUPS[markup]
        self._state = self._in_text
        self._rest = ""
        self._lead = ""  # text held back because a call may follow
        self._plain = False  # True if no call can follow any more
        self._value, self._held = JsonValue(), ""
        self._out: list[str | CallPiece] = []

    def feed(self, text: str, last: bool = False) -> list[str | CallPiece]:
        """Return the text and call pieces that are certain now; with `last`, all that is left."""
        self._rest += text
        while self._state(last):
            pass
        out, self._out = self._out, []
        return out

    # ---- states: each returns True if the (next) state can go on at once ----

    def _in_text(self, last: bool) -> bool:
        if self._markup.ends or (self._markup.begins and not self.calls):
            return self._before_mark(last)
        return self._before_object(last)

    def _before_object(self, last: bool) -> bool:
        """Handle text of calls that are JSON only, or that follow one mark for all."""
        begins, spaces = self._markup.begins, " \t\r\n" + self._markup.around
        rest = self._rest if self.calls else self._rest.lstrip().removeprefix(begins)
        rest = rest.lstrip(spaces if self.calls or begins else None)
        if self._plain or (rest and rest[0] != "{"):
            self._plain = True
            self._say(len(self._rest))
        elif rest:
            self._lead, self._rest = self._rest[: -len(rest)], rest
            self._state = self._in_head
            return True
        elif last and not self.calls:
            self._say(len(self._rest))
        return False

    def _before_mark(self, last: bool) -> bool:
        """Hold white space before a call, since a call may follow."""
        mark = self._markup.begins
        at = self._rest.find(mark)
        if at >= 0:
            self._say(len(self._rest[:at].rstrip()))
            if not self._markup.ends:
                self._state = self._before_object
                return True
            lead, _, self._rest = self._rest.partition(mark)
            self._lead, self._state = lead + mark, self._in_head
            return True
        held = next(
            n
            for n in range(min(len(mark) - 1, len(self._rest)), -1, -1)
            if self._rest.endswith(mark[:n])
        )
        certain = len(self._rest[: len(self._rest) - held].rstrip())
        if last and (self._rest.strip() or not self.calls):
            certain = len(self._rest)
        self._say(certain)
        return False

    def _in_head(self, last: bool) -> bool:
        found = _HEAD.match(self._rest)
        name = None if found is None else _decoded(f'"{found[1]}"')
        if found is not None and isinstance(name, str):
            self._out.append(CallPiece(self.calls, name))
            self.calls += 1
            self._rest = self._rest[found.end() :]
            self._value, self._held = JsonValue(), ""
            self._state = self._in_arguments
            return True
        ends = self._markup.ends
        end = self._rest.find(ends) if ends else _end_of_object(self._rest)
        if end >= 0:
            whole, self._rest = self._rest[:end], self._rest[end + len(ends) :]
            self._take_whole(whole)
            return True
        if last or len(self._rest) > MAX_HEAD_CHARS or self._is_no_call():
            self._take_text(self._rest)
            self._rest = ""
        return False

    def _is_no_call(self) -> bool:
        """Return True for JSON that cannot be a call, so that a JSON answer is not held back."""
        key = None if self._markup.begins else _FIRST_KEY.match(self._rest)
        return key is not None and (key[2] is not None or key[1] not in _KEYS)

    def _take_whole(self, text: str) -> None:
        """Take a whole call whose parts are in another order, or text that is no call."""
        value = _decoded(text)
        said = value if isinstance(value, dict) else {}
        name, arguments = said.get("name"), said.get("arguments", said.get("parameters"))
        if not isinstance(name, str) or not name:
            self._take_text(text + self._markup.ends)
            return
        self._out.append(CallPiece(self.calls, name))
        written = (
            arguments
            if isinstance(arguments, str)
            else json.dumps(arguments or {}, ensure_ascii=False)
        )
        self._out.append(CallPiece(self.calls, arguments=written or "{}"))
        self.calls += 1
        self.whole += 1
        self._state = self._in_text

    def _take_text(self, text: str) -> None:
        self._out.append(self._lead + text)
        self._plain = not self._markup.begins
        self._state = self._in_text

    def _in_arguments(self, last: bool) -> bool:
        taken = self._value.feed(self._rest)
        piece, self._rest = self._rest[:taken], self._rest[taken:]
        if self._value.is_held:  # a string that holds the JSON, or null
            self._held += piece
            piece = ""
            if self._value.ended:
                value = _decoded(self._held.strip())
                piece = value if isinstance(value, str) and value else "{}"
            elif last:
                piece = self._held
        if piece:
            self._out.append(CallPiece(self.calls - 1, arguments=piece))
        if not self._value.ended:
            return False
        self.whole += 1
        self._state = self._after_arguments
        return True

    def _after_arguments(self, last: bool) -> bool:
        """Skip the closing part of a call, and everything before its end mark."""
        ends = self._markup.ends
        if ends:
            at = self._rest.find(ends)
            if at < 0:
                self._rest = self._rest[-len(ends) :]
                return False
            self._rest = self._rest[at + len(ends) :]
        else:
            more = bool(self._markup.begins)  # an id may follow
            found = re.match(r"[^}]*\}" if more else r"\s*\}", self._rest)
            if found is None and (more or not self._rest.strip()):
                return False
            self._rest = self._rest[found.end() :] if found else self._rest
            self._plain = found is None
        self._state = self._in_text
        return True

    def _say(self, chars: int) -> None:
        if chars:
            self._out.append(self._rest[:chars])
            self._rest = self._rest[chars:]


class JsonValue:
    """Finds the end of a JSON value that comes in pieces, without validating it."""

    def __init__(self) -> None:
        self.ended = False
        self._first = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_held(self) -> bool:
        """True if it is neither an object nor a list."""
        return self._first not in ("", "{", "[")

    def feed(self, text: str) -> int:
        """Return how many characters of the text belong to the value."""
        for at, char in enumerate(text):
            if self._in_string:
                self._within(char)
            elif not self._outside(char):
                self.ended = True  # a bare word, which ends where its surroundings go on
                return at
            if self.ended:
                return at + 1
        return len(text)

    def _within(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.ended = self._depth == 0

    def _outside(self, char: str) -> bool:
        """Return True if a character outside of strings belongs to the value."""
        self._first = self._first or char.strip()
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
            return self._depth >= 0
        elif char == ",":
            return self._depth > 0
        return True


def _end_of_object(text: str) -> int:
    value = JsonValue()
    taken = value.feed(text)
    return taken if value.ended else -1


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
