"""JSON with comments and trailing commas, as wrangler reads files of both names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<comment>//[^\r\n]*|/\*.*?\*/)"
    r"|(?P<space>[ \t\r\n]+)"
    r'|(?P<rest>[^\s"/,]+|.)',
    re.DOTALL,
)


def parse(text: str) -> object:
    """Raises ValueError naming line and column; a name that is said twice is an error too.

    What JSON does not know is blanked out before a JSON parser reads the rest, so that its
    positions are those of the file.
    """
    return json.loads(
        "".join(_blanked(text.removeprefix("\ufeff"))),
        object_pairs_hook=_table,
        parse_constant=_refuse_constant,
    )


def _blanked(text: str) -> Iterator[str]:
    """`text` in pieces, with spaces for comments and for a comma before a closing bracket."""
    held, before = "", ""  # from the last comma on; what stood before that comma or here
    for token in TOKEN.finditer(text):
        piece = token.group()
        if token.lastgroup == "comment":
            piece = re.sub(r"[^\r\n]", " ", piece)
        if token.lastgroup in ("comment", "space"):
            held += piece
            continue
        if piece[0] in "]}" and held.startswith(",") and before not in ("[", "{", ",", ":"):
            held = " " + held[1:]
        yield held
        held = ""
        if piece == ",":
            held = piece
        else:
            yield piece
            before = piece[-1]
    yield held


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{twice}" is said twice in one object')
    return table


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
