"""Several origins' answers as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ledger.errors import TailraceError, error_body

Document = dict[str, Any]
Answers = Mapping[str, Document | TailraceError]
"""What each origin said, by its address, or why it said nothing."""


def side_by_side(answers: Answers) -> Document:
    """Each for itself: an origin that did not answer has an `error` instead."""
    return {"origins": [_told(address, answer) for address, answer in answers.items()]}


def one_page(answers: Answers, sort: str, *, falls: bool, offset: int, limit: int) -> Document:
    """One page of the streams of all, each of which has said its first `offset + limit`.

    Counts are sums; the cursor is all of theirs.
    """
    pages = {key: page for key, page in answers.items() if not isinstance(page, TailraceError)}
    streams = [row | {"origin": key} for key, page in pages.items() for row in page["streams"]]
    ended = [row | {"origin": key} for key, page in pages.items() for row in page["ended"]]
    if len(pages) > 1:
        streams.sort(key=lambda row: _rank(row[sort]), reverse=falls)
        streams = streams[offset : offset + limit]
        ended.sort(key=lambda row: row["ended_ms"], reverse=True)
    states: Counter[str] = Counter()
    for page in pages.values():
        states.update(page["states"])
    counts = {key: sum(page[key] for page in pages.values()) for key in ("live", "paused", "found")}
    return {
        "now_ms": max((page["now_ms"] for page in pages.values()), default=0),
        **counts,
        "states": states,
        "streams": streams,
        "ended": ended,
        "cursor": ",".join(page["cursor"] for page in pages.values()),
        **side_by_side({key: {} if key in pages else answers[key] for key in answers}),
    }


def whose(answers: Answers) -> tuple[str, Document]:
    """The origin that has a stream now, or else one in whose ledger it is.

    Raises what most is known by: the error of an origin that was reached, if there is one.
    """
    found = [(key, one) for key, one in answers.items() if not isinstance(one, TailraceError)]
    ranked = sorted(found, key=lambda pair: (not pair[1]["live"], not pair[1]["lately"]))
    if ranked:
        return ranked[0]
    errors = [one for one in answers.values() if isinstance(one, TailraceError)]
    raise min(errors, key=lambda error: error.status >= 500)


def _rank(value: Any) -> tuple[bool, Any]:
    """Among values of one column: what is absent comes first, as the smallest."""
    return (value is not None, value)


def _told(address: str, answer: Document | TailraceError) -> Document:
    if isinstance(answer, TailraceError):
        return {"origin": address} | error_body(answer)
    return {"origin": address} | answer
