"""The access rules in the order in which they apply, the same for HTTP and WebSockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from tailrace.edge.access.authenticator import Authenticator, OverLimit
from tailrace.edge.access.head import Head, Proxies
from tailrace.edge.access.hosts import HostRule
from tailrace.edge.access.page_origins import PROXY_HINT, OriginRule, access_headers
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Caller, Priority

MAX_LOGGED_REFUSALS = 64
"""Maximum number of different page origins and hosts whose refusal is logged."""
MAX_LOGGED_CHARS = 300
"""Maximum length of a logged page origin or host; a host name has at most 253 characters."""

log = structlog.get_logger("tailrace.edge")


class RefusalLog:
    """Logs each page origin and each host name that is refused because of a setting, once.

    The response has the same message, but a page cannot read this response, and a proxy's log does
    not show it.
    """

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, error: TailraceError, head: Head) -> None:
        names = {"foreign_origin": head.value(b"origin"), "foreign_host": head.host}
        name = names.get(error.code)
        if not name or len(name) > MAX_LOGGED_CHARS or (error.code, name) in self._logged:
            return
        if len(self._logged) < MAX_LOGGED_REFUSALS:
            self._logged.add((error.code, name))
            if error.code == "foreign_origin":
                hint = (
                    f"to let its pages use this edge add {name!r} to edge.allowed_origins;"
                    f" {PROXY_HINT}"
                )
                log.warning("page origin refused", origin=name, hint=hint)
            else:
                log.warning("host refused", host=name, hint=error.hint)


class Admission(NamedTuple):
    """The decision about a request: refused with `refusal`, or admitted if `refusal` is None.

    `head` is the request as the client sent it, without its API key. `headers` must be added to the
    response. `caller` is passed on in requests to origins. `priority` is the class that the
    request's key is bound to, if any. `Rules.done` must be called when the response to an admitted
    request has ended.
    """

    head: Head
    headers: Mapping[str, str]
    refusal: TailraceError | None
    caller: Caller | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The access rules of one edge. `admit` is called once for a request, before anything else."""

    proxies: Proxies
    hosts: HostRule
    pages: OriginRule
    authenticator: Authenticator
    refusals: RefusalLog = field(default_factory=RefusalLog)

    def admit(self, head: Head, *, has_token: bool = False) -> Admission:
        """Admit or refuse a request; `has_token` means that its query has a resume token."""
        head = self.proxies.resolve(head)
        headers = access_headers(self.pages, head.value(b"origin"))
        try:
            self.hosts.check(head)
            self.pages.check(head)
            grant = self.authenticator.admit(head, has_token=has_token)
        except OverLimit as error:
            return Admission(head, {**headers, **error.headers}, error)
        except TailraceError as error:
            self.refusals.note(error, head)
            return Admission(head, headers, error)
        if grant.headers:
            headers = {**headers, **grant.headers}
        return Admission(grant.head, headers, None, grant.caller, grant.priority)

    def done(self, admission: Admission) -> None:
        if admission.refusal is None:
            self.authenticator.done(admission.caller)
