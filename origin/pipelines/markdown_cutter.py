"""Divides Markdown into pieces that do not end inside an element, such as a link. Sans-I/O.

The places at which a piece may end depend on the text alone, not on how it arrives: the end of an
element is searched for in at most `most_chars` characters from its beginning.
"""

from __future__ import annotations

import re

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_PLAIN = re.compile(r"[^\\`!\[*_~\n]+|\n")
_MARKER = re.compile(r"\*+|_+|~+")
_TICKS = re.compile(r"`+")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_BRACKETS = re.compile(r"!?\[(?:[^\[\]\\]|\\.|\[(?:[^\[\]\\]|\\.)*\])*\]", re.DOTALL)
_TARGET = re.compile(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)", re.DOTALL)
_FENCE = re.compile(r"[ \t>]*(?:(`{3,})[^`\n]*|(~{3,})[^\n]*)")
_MAY_BE_FENCE = re.compile(r"[ \t>]*(?:`{0,2}|~{0,2})")


class MarkdownCutter:
    """Gives a text in pieces that do not end inside an element of Markdown.

    Elements are the first and last line of a fenced code block, code spans, links and images,
    escapes, and runs of the same emphasis marker. An element that is longer than `most_chars`
    characters is treated as plain text.
    """

    def __init__(self, most_chars: int) -> None:
        """Begin at the beginning of a text."""
        self.held = ""
        self._most_chars = most_chars
        self._fence = ""  # the marks that opened the code block around the held text
        self._is_line_start = True

    def feed(self, text: str, last: bool = False) -> list[str]:
        """Add text to the held text, and return the part that may be passed on.

        `last` is True if the held text must be passed on, because an item of another kind follows.
        An open code block stays open, because its text may continue after that item.
        """
        self.held += text
        at = 0
        while at < len(self.held):
            window = self.held[at : at + self._most_chars]
            is_final = last or len(window) == self._most_chars
            length = self._code_line(window, is_final)
            if length is None and not self._fence:
                length = _inline(window, is_final)
            if not length:
                break
            self._is_line_start = window[length - 1] == "\n"
            at += length
        piece, self.held = self.held[:at], self.held[at:]
        return [piece] if piece else []

    def _code_line(self, window: str, is_final: bool) -> int | None:
        """Return the length of a line of code, or of one that begins or ends a code block.

        It is 0 if it is not known yet, and None for other text.
        """
        line, newline, _ = window.partition("\n")
        length = len(line) + len(newline)
        if not self._is_line_start:
            return length if self._fence else None
        found = _FENCE.fullmatch(line)
        marks = "" if found is None else found[1] or found[2]
        may_be_fence = bool(marks) or _MAY_BE_FENCE.fullmatch(line) is not None
        if may_be_fence and not newline and not is_final:
            return 0
        if not self._fence:
            self._fence = marks
            return length if marks else None
        if marks.startswith(self._fence) and line.rstrip().endswith(marks):
            self._fence = ""
        return length


def _inline(window: str, is_final: bool) -> int:
    """Return the length of the element at the beginning of a text; 0 if it is not known yet."""
    if (plain := _PLAIN.match(window)) is not None:
        return plain.end()
    if window[0] == "\\":
        return 2 if len(window) > 1 else int(is_final)
    if window[0] == "`":
        return _code(window, is_final)
    if window[0] == "!" and window[1:2] != "[":
        return 1 if len(window) > 1 or is_final else 0
    if (marker := _MARKER.match(window)) is not None:
        return marker.end() if marker.end() < len(window) or is_final else 0
    return _link(window, is_final)


def _code(window: str, is_final: bool) -> int:
    paragraph, is_whole = _paragraph(window, is_final)
    code, ticks = _CODE.match(paragraph), _TICKS.match(window)
    assert ticks is not None
    if code is not None and (is_whole or code.end() < len(paragraph)):
        return code.end()
    return ticks.end() if is_whole else 0


def _link(window: str, is_final: bool) -> int:
    paragraph, is_whole = _paragraph(window, is_final)
    brackets = _BRACKETS.match(paragraph)
    if brackets is None:
        return 1 if is_whole else 0
    end = brackets.end()
    if end == len(paragraph):
        return end if is_whole else 0
    if paragraph[end] != "(":
        return end
    target = _TARGET.match(paragraph, end)
    if target is None:
        return end if is_whole else 0
    return target.end()


def _paragraph(window: str, is_final: bool) -> tuple[str, bool]:
    """Return the text up to the next blank line, which no element contains.

    The second value is True if no more text can follow.
    """
    blank = _BLANK_LINE.search(window)
    return (window, is_final) if blank is None else (window[: blank.start()], True)
