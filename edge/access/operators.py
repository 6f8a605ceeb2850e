"""Access to the operators' routes: `/v1/admin`, `/metrics`, and the details of `/readyz`.

If the edge has API keys, operators are the callers whose key has the right `admin`. Without keys,
they are the programs and pages of this machine. A request that a proxy on this machine forwards
also comes from loopback, but any client may have sent it, so a request that looks forwarded is
refused. Not every proxy can be recognised, so `/v1/admin` without a key also needs the setting
`edge.operator_without_key`.
"""

from __future__ import annotations

from tailrace.edge.access.head import Head
from tailrace.edge.access.hosts import is_loopback, name_of
from tailrace.edge.access.page_origins import OriginRule
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.errors import Forbidden
from tailrace.ledger.frame import Caller
from tailrace.ledger.links.rights import Right

FORWARDED_HEADERS = frozenset(
    (
        *(b"via", b"forwarded", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip"),
        *(b"client-ip", b"true-client-ip", b"cf-connecting-ip", b"cf-ray", b"fastly-client-ip"),
        *(b"x-original-for", b"x-original-host", b"x-original-forwarded-for", b"x-proxyuser-ip"),
        *(b"cdn-loop", b"x-envoy-external-address"),
    )
)
"""Header fields that proxies add, besides those that begin with `X-Forwarded`."""
KEY_HINT = (
    "tailrace key add NAME --rights admin --keys FILE, where FILE is the setting edge.api_keys"
    " of this edge"
)
SETTING_HINT = (
    "set edge.operator_without_key = true if no proxy on this machine forwards requests to this"
    f" edge; or create an operator's key: {KEY_HINT}"
)
OWN_PAGES = OriginRule(())


def was_forwarded(head: Head, http_version: str) -> bool:
    """Return True if the request shows that a proxy forwarded it.

    HTTP/1.0 is such a sign: by default nginx uses it for the servers behind it, and no browser or
    current HTTP client does.
    """
    return http_version == "1.0" or any(
        name in FORWARDED_HEADERS or name.startswith(b"x-forwarded") for name, _ in head.headers
    )


def is_direct(head: Head, http_version: str, config: EdgeConfig) -> bool:
    """Return True if a program on this machine sent the request to this edge without a proxy."""
    return (
        config.is_private
        and (not head.address or is_loopback(head.address))
        and is_loopback(name_of(head.host))
        and not was_forwarded(head, http_version)
    )


def sees_details(head: Head, http_version: str, caller: Caller | None, config: EdgeConfig) -> bool:
    """Return True if the caller may be told about origins: it has a key, or is on this machine."""
    if caller is not None:
        return bool(caller.tenant)
    return is_direct(head, http_version, config)


def require_operator(
    head: Head, http_version: str, caller: Caller | None, config: EdgeConfig
) -> None:
    """Raise Forbidden unless the caller may use `/v1/admin`."""
    if caller is not None:
        if Right.ADMIN not in Right(caller.rights):
            raise Forbidden(
                "this API key lacks the right `admin`", field="Authorization", hint=KEY_HINT
            )
        return
    if not config.operator_without_key:
        raise Forbidden(
            "this edge has no API keys, and operators' routes need one",
            hint=SETTING_HINT,
        )
    if not is_direct(head, http_version, config):
        raise Forbidden(
            "without API keys, operators' routes only answer direct requests from this machine",
            hint=KEY_HINT,
        )
    OWN_PAGES.check(head)
