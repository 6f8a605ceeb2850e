"""Patterns of stream names: `*` is one segment, `**` is any number of them, none included."""

from __future__ import annotations

from urllib.parse import unquote

ONE = "*"
ANY = "**"


class Glob:
    """`matches` takes time in the product of both lengths at most, whatever the pattern."""

    def __init__(self, pattern: str) -> None:
        # None stands for one segment; a name may have a star of its own, written %2A.
        self._segments = tuple(
            part if part == ANY else None if part == ONE else unquote(part)
            for part in pattern.split("/")
            if part
        )
        self._any = tuple(part == ANY for part in pattern.split("/") if part)

    @property
    def first(self) -> str | None:
        """The first segment of every name that matches; None if it can be any."""
        return None if self._any[0] else self._segments[0]

    def matches(self, name: str) -> bool:
        wanted, given = self._segments, name.split("/")
        at = place = 0
        star = mark = -1  # the last ** and the first segment that it does not cover yet
        while place < len(given):
            if at < len(wanted) and self._any[at]:
                star, mark = at, place
                at += 1
            elif at < len(wanted) and wanted[at] in (None, given[place]):
                at += 1
                place += 1
            elif star >= 0:
                mark += 1
                at, place = star + 1, mark
            else:
                return False
        return all(self._any[at:])
