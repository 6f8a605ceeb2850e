"""Every rule about who may ask, in the order in which they apply; the same for all transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edge.access.cors import access_headers
from edge.access.gate import Gate
from edge.access.head import Head
from edge.access.pages import HostRule, OriginRule
from edge.access.proxies import Proxies
from ledger.errors import TailraceError
from ledger.frame import Caller


class Admission(NamedTuple):
    """What becomes of a request: `refusal` is the answer, unless there is none.

    `head` is the request as the client sent it, without its API key; `headers` go with whatever
    is answered. The requests that it makes of an origin say `caller`. Where there is no refusal
    `Rules.done` is to be called when the answer has ended.
    """

    head: Head
    headers: Mapping[str, str]
    refusal: TailraceError | None
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one edge. `admit` is asked once for a request, before anything else is done for it."""

    proxies: Proxies
    hosts: HostRule
    pages: OriginRule
    gate: Gate

    def admit(self, head: Head, *, has_token: bool = False) -> Admission:
        """`has_token`: the request has a resume token besides its headers, in its query."""
        head = self.proxies.resolve(head)
        headers = access_headers(self.pages, head.value(b"origin"))
        try:
            self.hosts.check(head)
            self.pages.check(head)
            grant = self.gate.admit(head, has_token=has_token)
        except TailraceError as error:
            return Admission(head, headers, error)
        return Admission(grant.head, headers, None, grant.caller)

    def done(self, admission: Admission) -> None:
        if admission.refusal is None:
            self.gate.done(admission.caller)
