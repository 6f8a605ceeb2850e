"""Who is an operator: whoever has a key with the right `admin`.

On an edge without keys everybody who reaches it is somebody; where only this machine does, that
is an operator, but no page of another site that happens to be open on this machine, whatever
`edge.allowed_origins` says.
"""

from __future__ import annotations

from edge.access.head import Head
from edge.access.pages import OriginRule
from edge.config import EdgeConfig
from ledger.errors import Forbidden
from ledger.frame import Caller
from ledger.rights import Right

OWN_PAGES = OriginRule(())


def require_operator(head: Head, caller: Caller | None, config: EdgeConfig) -> None:
    """Raises Forbidden for anybody else; who has no key was refused before."""
    if caller is not None:
        if Right.ADMIN not in Right(caller.rights):
            raise Forbidden("this API key is no operator's", field="Authorization", hint=HINT)
        return
    if not config.listens_on_loopback_alone or config.trusted_proxies:
        raise Forbidden(
            "others can reach this edge, and it has no API keys by which to know an operator",
            hint=HINT,
        )
    OWN_PAGES.check(head)


HINT = "tailrace key add NAME --rights admin"
