"""Tool calls in a model's text: how model families write them, and a reader for them.

A model that was trained to call tools writes its calls as text, in the markup of its family, which
its chat template shows. `CallReader` extracts the calls from the text. Its state depends only on
the text so far, not on how the text was divided into pieces. So a worker that continues a stream
reaches the state of the interrupted run by feeding the same text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tailrace.ledger.errors import CallerError

MAX_HEAD_CHARS = 1024
"""Maximum characters between the start of a call and its arguments; longer text is not a call."""

MarkupName = Literal["hermes", "llama", "mistral"]


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup in which a model family writes a call, `{"name": …, ARGUMENTS: {…}}`.

    `begins` and `ends` are the marks before and after a call; a tokenizer may have them as special
    tokens. `arguments` is the key ARGUMENTS. `around` has the punctuation that, besides white
    space, may stand before and between calls. If `ends` is empty, several calls may follow one
    `begins`. `id_chars` is the required length of a call's id.
    """

    begins: str
    ends: str
    arguments: str
    around: str = ""
    id_chars: int | None = None


MARKUPS: dict[MarkupName, Markup] = {
    "hermes": Markup("<tool_call>", "</tool_call>", "arguments"),  # also the markup of Qwen
    "llama": Markup("", "", "parameters", ";"),  # bare JSON, without tags around a call
    "mistral": Markup("[TOOL_CALLS]", "", "arguments", "[,]", 9),
}


def markup_of(template: str) -> MarkupName | None:
    """Return the markup that a chat template shows; None if it shows none or an unknown one."""
    if not shows_tools(template):
        return None
    if "<tool_call>" in template:
        return "hermes"
    if '"parameters": ' in template and ("ipython" in template or "python_tag" in template):
        return "llama"
    # Later versions of this markup have no JSON list, and are not supported.
    if re.search(r"\[TOOL_CALLS\] ?\[", template):
        return "mistral"
    return None


def read_calls(text: str, field: str) -> list[dict[str, str]]:
    """Return the calls of a `Message`, each with `id`, `name`, `arguments`.

    Raises CallerError if they are malformed.
    """
    return _objects(text, field, ("id", "name", "arguments"))


def read_functions(text: str) -> list[dict[str, Any]]:
    """Return the functions in the JSON list of `Tools`; raises CallerError if it is malformed."""
    functions = _objects(text, "tools", ("name",))
    for at, function in enumerate(functions):
        if not isinstance(function.setdefault("parameters", {}), dict | bool):
            raise CallerError("is not a JSON schema", field=f"tools[{at}].parameters")
    return functions


def _objects(text: str, field: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    value = _decoded(text)
    if not isinstance(value, list):
        raise CallerError("is not a JSON list", field=field)
    for at, item in enumerate(value):
        for key in keys:
            if not isinstance(item, dict) or not isinstance(item.get(key), str):
                raise CallerError(f"has no {key}", field=f"{field}[{at}]")
    return value


def shows_tools(template: str) -> bool:
    """Return True if a chat template writes the request's tools into the prompt."""
    return re.search(r"\btools\b", template) is not None


class ToolUse(BaseModel):
    """The tools that a stream may call.

    `functions` is a JSON list of functions. `choice` is a word of `ToolChoice`. `only` is the name
    of the only function that may be called, if there is one. `markup` is None for a worker of kind
    `text`, whose upstream server knows how its model calls tools.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: str
    choice: str
    only: str | None = None
    parallel: bool = True
    markup: MarkupName | None = None

    @property
    def forced(self) -> bool:
        """True if the output must consist of tool calls only."""
        return self.choice == "required"


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of one tool call; `call` is the call's index in the stream, from 0.

    The first piece of a call has the function's `name`, and the `id` that an upstream server gave
    the call. The other pieces have parts of the arguments.
    """

    call: int
    name: str = ""
    arguments: str = ""
    id: str = ""

    @property
    def size(self) -> int:
        """Size of name and arguments in UTF-8 bytes; never 0."""
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
    """Separates a model's output into text and tool calls.

    `calls` is the number of calls that have begun, `whole` that of completed ones.
    """

    def __init__(self, markup: MarkupName) -> None:
        self.calls = 0
        self.whole = 0
        self._markup = MARKUPS[markup]
        self._state = self._in_text
        self._rest = ""
        self._lead = ""  # text before a possible call, held back until it is certain
        self._plain = False  # True if all further output is text
        self._value, self._held = JsonValue(), ""
        self._out: list[str | CallPiece] = []

    def feed(self, text: str, last: bool = False) -> list[str | CallPiece]:
        """Add more output of the model; return the text and pieces of calls that are now certain.

        With `last`, no output follows, so nothing is held back any more.
        """
        self._rest += text
        while self._state(last):
            pass
        out, self._out = self._out, []
        return out

    # ---- states: each returns True if the current state, which it may change, can go on ----

    def _in_text(self, last: bool) -> bool:
        if self._markup.ends or (self._markup.begins and not self.calls):
            return self._before_mark(last)
        return self._before_object(last)

    def _before_object(self, last: bool) -> bool:
        """Find a call that is plain JSON, without a mark in front of it."""
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
        """Find the mark of a call; white space and partial marks are held back until then."""
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
        """Return True if the text so far begins like JSON, but not like a call.

        The first key shows this. Such text is not held back, because it is part of the answer.
        """
        key = None if self._markup.begins else _FIRST_KEY.match(self._rest)
        return key is not None and (key[2] is not None or key[1] not in _KEYS)

    def _take_whole(self, text: str) -> None:
        """Handle a complete object: a call with its keys in another order, or else text."""
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
        if self._value.is_held:  # the arguments are a JSON string that contains JSON, or null
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
        """Skip the output after a call's arguments, up to the end of the call."""
        ends = self._markup.ends
        if ends:
            at = self._rest.find(ends)
            if at < 0:
                self._rest = self._rest[-len(ends) :]
                return False
            self._rest = self._rest[at + len(ends) :]
        else:
            more = bool(self._markup.begins)  # the call's id may follow
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
        """True if the value is neither an object nor a list, so it is not passed on in pieces."""
        return self._first not in ("", "{", "[")

    def feed(self, text: str) -> int:
        """Return how many characters of the text belong to the value."""
        for at, char in enumerate(text):
            if self._in_string:
                self._within(char)
            elif not self._outside(char):
                self.ended = True  # a number or literal ends where another character comes
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
