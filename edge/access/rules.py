"""Every rule about who may ask, in the order in which they apply; the same for all transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edge.access.cors import access_headers
from edge.access.head import Head
from edge.access.pages import HostRule, OriginRule
from edge.access.proxies import Proxies
from ledger.errors import TailraceError


class Admission(NamedTuple):
    """What becomes of a request: `refusal` is the answer, unless there is none.

    `head` is the request as the client sent it, `headers` go with whatever is answered.
    """

    head: Head
    headers: Mapping[str, str]
    refusal: TailraceError | None


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one edge. `admit` is asked once for a request, before anything else is done for it."""

    proxies: Proxies
    hosts: HostRule
    origins: OriginRule

    def admit(self, head: Head) -> Admission:
        head = self.proxies.resolve(head)
        headers = access_headers(self.origins, head.value(b"origin"))
        try:
            self.hosts.check(head)
            self.origins.check(head)
        except TailraceError as error:
            return Admission(head, headers, error)
        return Admission(head, headers, None)
