"""JSON with comments and trailing commas, as wrangler reads `.json` and `.jsonc` files."""

from __future__ import annotations

import json
import re

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\r\n]*|/\*.*?\*/", re.DOTALL)
# Finds a trailing comma: between a value and a closing bracket. The second alternative skips
# strings, so that a comma inside one is not taken for a trailing comma.
_LAST_COMMA = re.compile(
    rf'(?P<value>(?:{_STRING}|[^\s\[{{,:"])\s*),(?=\s*[\]}}])|{_STRING}', re.DOTALL
)


def parse(text: str) -> object:
    """Parse a text and return its value.

    Comments and trailing commas are replaced by spaces before a JSON parser reads the text.
    Therefore the lines and columns in its errors are those of the file.

    Raises:
        ValueError: The text is not valid, or an object has the same name twice.
    """
    plain = _COMMENT.sub(_without_comment, text.removeprefix("\ufeff"))
    plain = _LAST_COMMA.sub(
        lambda found: f"{found['value']} " if found["value"] else found[0], plain
    )
    return json.loads(plain, object_pairs_hook=_table, parse_constant=_refuse_constant)


def _without_comment(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else re.sub(r"[^\r\n]", " ", found[0])


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{twice}" is given twice in one object')
    return table


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not JSON")
