"""Sends operators' queries to origins, as Calls: each origin has an object that answers them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import whole_answer
from tailrace.ledger.errors import OriginUnreachable, TailraceError, error_body
from tailrace.ledger.frame import Call, Caller

Document = dict[str, Any]
Answers = Mapping[str, Document | TailraceError]
"""Maps the address of each origin to its answer, or to an error if the origin has not answered."""


def by_origin(answers: Answers) -> Document:
    """Return all answers in one document. An origin that did not answer has an `error` instead."""
    return {"origins": [_row(address, answer) for address, answer in answers.items()]}


def require_success(answers: Answers) -> None:
    """Raise the error of one origin if no origin has carried out the command.

    The refusal of an origin (4xx) is preferred to the failure of another one (5xx).
    """
    errors = [one for one in answers.values() if isinstance(one, TailraceError)]
    if errors and len(errors) == len(answers):
        raise min(errors, key=lambda error: error.status >= 500)


def merged_page(answers: Answers, sort: str, *, falls: bool, offset: int, limit: int) -> Document:
    """Merge the origins' lists of streams into one page.

    Each answer must have the first `offset + limit` streams of its origin, sorted by the field
    `sort`, in descending order if `falls`. The counts are added up, and the cursors are joined.
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
        **by_origin({key: {} if key in pages else answers[key] for key in answers}),
    }


def find_stream(answers: Answers) -> tuple[str, Document]:
    """Return the address and the answer of the origin that runs a stream, or whose ledger has it.

    If no origin has the stream, raises the error of one origin. The refusal of an origin (4xx) is
    preferred to the failure of another one (5xx).
    """
    found = [(key, one) for key, one in answers.items() if not isinstance(one, TailraceError)]
    ranked = sorted(found, key=lambda pair: (not pair[1]["live"], not pair[1]["lately"]))
    if ranked:
        return ranked[0]
    errors = [one for one in answers.values() if isinstance(one, TailraceError)]
    raise min(errors, key=lambda error: error.status >= 500)


def _rank(value: Any) -> tuple[bool, Any]:
    """Return the sort key of a value. An absent value is the smallest."""
    return (value is not None, value)


def _row(address: str, answer: Document | TailraceError) -> Document:
    if isinstance(answer, TailraceError):
        return {"origin": address} | error_body(answer)
    return {"origin": address} | answer


OPERATOR = "operator"
"""Class of the object that answers operators' queries; each origin has one."""
TIMEOUT_S = 5.0
"""Timeout for an origin's answer, in seconds. The other origins' answers are shown anyway."""
SIMULATION_TIMEOUT_S = 70.0


@dataclass(frozen=True, slots=True)
class OriginQueries:
    """Sends the queries of one operator; `caller` has its tenant and rights."""

    link: OriginPool
    caller: Caller | None

    def call(
        self, asked: str, query: dict[str, str], method: str = "GET", body: bytes = b""
    ) -> Call:
        """Return the Call frame for the path `asked` below `/v1/admin/`."""
        url = f"http://operator/{asked}?{urlencode(query)}"
        return Call(OPERATOR, asked, method, url, body=body, caller=self.caller)

    async def all(
        self, call: Call, origins: Iterable[str] | None = None
    ) -> dict[str, Document | TailraceError]:
        """Return the answers of all origins, or of the origins at the given addresses.

        Raises the first refusal if all origins refuse, because then the query itself is wrong.
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

    async def one(self, address: str, call: Call, timeout_s: float = TIMEOUT_S) -> Document:
        """Return the answer of one origin. Raises the origin's refusal, or OriginUnreachable."""
        if not any(one.usable and one.address == address for one in self.link.origins):
            raise OriginUnreachable("this edge has no link to the origin")
        try:
            async with asyncio.timeout(timeout_s):
                status, said = await whole_answer(self.link, call, address)
        except TimeoutError:
            raise OriginUnreachable(f"no answer within {timeout_s:g} s") from None
        document: Any = json.loads(said)
        if status >= 400:
            error = document["error"]
            raise TailraceError(error.pop("message"), status=status, **error)
        return dict(document)
