"""One question to origins: a Call to the object of class `operator` that each of them has."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tailrace.edge.origins.link import Link, whole_answer
from tailrace.ledger.errors import OriginUnreachable, TailraceError, error_body
from tailrace.ledger.frame import Call, Caller

Document = dict[str, Any]
Answers = Mapping[str, Document | TailraceError]
"""What each origin said, by its address, or why it said nothing."""


def side_by_side(answers: Answers) -> Document:
    """Each for itself: an origin that did not answer has an `error` instead."""
    return {"origins": [_told(address, answer) for address, answer in answers.items()]}


def require_done(answers: Answers) -> None:
    """Raise why no origin has carried out an order; one that an origin has refused comes first."""
    errors = [one for one in answers.values() if isinstance(one, TailraceError)]
    if errors and len(errors) == len(answers):
        raise min(errors, key=lambda error: error.status >= 500)


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


OPERATOR = "operator"
"""The class of objects."""
PATIENCE_S = 5.0
"""An origin that has not answered by then is left out: the others' answers are shown."""
SIMULATION_PATIENCE_S = 70.0


@dataclass(frozen=True, slots=True)
class Asking:
    """Questions of one operator; `caller` says of which tenant, and with which rights."""

    link: Link
    caller: Caller | None

    def call(
        self, asked: str, query: dict[str, str], method: str = "GET", body: bytes = b""
    ) -> Call:
        url = f"http://operator/{asked}?{urlencode(query)}"
        return Call(OPERATOR, asked, method, url, body=body, caller=self.caller)

    async def all(
        self, call: Call, origins: Iterable[str] | None = None
    ) -> dict[str, Document | TailraceError]:
        """What each origin says, or those of these addresses.

        Raises what they refuse with where all of them do: then it is the question's fault.
        """

        async def safely(address: str) -> Document | TailraceError:
            try:
                return await self.one(address, call)
            except TailraceError as error:
                return error

        addresses = [origin.address for origin in self.link.origins]
        asked_of = [one for one in addresses if origins is None or one in set(origins)]
        answers = await asyncio.gather(*map(safely, asked_of))
        refusals = [one for one in answers if isinstance(one, TailraceError) and one.status < 500]
        if refusals and len(refusals) == len(answers):
            raise refusals[0]
        return dict(zip(asked_of, answers, strict=True))

    async def one(self, address: str, call: Call, patience_s: float = PATIENCE_S) -> Document:
        """What one origin says; raises what it refuses with, OriginUnreachable if it is silent."""
        if not any(one.usable and one.address == address for one in self.link.origins):
            raise OriginUnreachable("there is no link to this origin")
        try:
            async with asyncio.timeout(patience_s):
                status, said = await whole_answer(self.link, call, address)
        except TimeoutError:
            raise OriginUnreachable(f"no answer within {patience_s:g} s") from None
        document: Any = json.loads(said)
        if status >= 400:
            error = document["error"]
            raise TailraceError(error.pop("message"), status=status, **error)
        return dict(document)
