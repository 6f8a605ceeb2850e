"""One question to origins: a Call to the object of class `operator` that each of them has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from edge.admin.merge import Document
from edge.origins.link import Link
from edge.reader import whole_answer
from ledger.errors import OriginUnreachable, TailraceError
from ledger.frame import Call, Caller

OPERATOR = "operator"
"""The class of objects."""
PATIENCE_S = 5.0
"""An origin that has not answered by then is left out: the others' answers are shown."""
SIMULATION_PATIENCE_S = 70.0


class Asking:
    """Questions of one operator; `caller` says of which tenant, and with which rights."""

    def __init__(self, link: Link, caller: Caller | None) -> None:
        self._link = link
        self._caller = caller

    async def all(
        self,
        asked: str,
        query: dict[str, str],
        origins: Iterable[str] | None = None,
        *,
        method: str = "GET",
        body: bytes = b"",
    ) -> dict[str, Document | TailraceError]:
        """What each origin says, or those of these addresses.

        Raises what they refuse with where all of them do: then it is the question's fault.
        """
        addresses = [origin.address for origin in self._link.origins]
        asked_of = [one for one in addresses if origins is None or one in set(origins)]
        told = (self._safely(one, asked, query, method, body) for one in asked_of)
        answers = await asyncio.gather(*told)
        refusals = [one for one in answers if isinstance(one, TailraceError) and one.status < 500]
        if refusals and len(refusals) == len(answers):
            raise refusals[0]
        return dict(zip(asked_of, answers, strict=True))

    async def _safely(
        self, address: str, asked: str, query: dict[str, str], method: str, body: bytes
    ) -> Document | TailraceError:
        try:
            return await self.one(address, asked, query, method=method, body=body)
        except TailraceError as error:
            return error

    async def one(
        self,
        address: str,
        asked: str,
        query: dict[str, str],
        *,
        method: str = "GET",
        body: bytes = b"",
        patience_s: float = PATIENCE_S,
    ) -> Document:
        """What one origin says; raises what it refuses with, OriginUnreachable if it is silent."""
        if not any(one.usable and one.address == address for one in self._link.origins):
            raise OriginUnreachable("there is no link to this origin")
        url = f"http://operator/{asked}?{urlencode(query)}"
        call = Call(OPERATOR, asked, method, url, body=body, caller=self._caller)
        try:
            async with asyncio.timeout(patience_s):
                status, said = await whole_answer(self._link, call, address)
        except TimeoutError:
            raise OriginUnreachable(f"no answer within {patience_s:g} s") from None
        document: Any = json.loads(said)
        if status >= 400:
            raise _error(status, document["error"])
        return dict(document)


def _error(status: int, said: dict[str, Any]) -> TailraceError:
    return TailraceError(
        said["message"],
        code=said["code"],
        status=status,
        retryable=said["retryable"],
        field=said.get("field"),
        hint=said.get("hint"),
    )
