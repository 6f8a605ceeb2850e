"""What a caller may do with a stream, by the API key that an edge has checked or by a token.

Two things speak for a caller: the rights that an edge tells of, for streams of that tenant, and
a resume token, for its stream, whoever has it. A stream of another tenant is as if absent.
"""

from __future__ import annotations

from ledger.errors import Forbidden, NotFound, Unauthorized, unknown_stream
from ledger.interface import Ledger, StreamInfo, StreamKind
from ledger.rights import OF_A_STREAM, Right
from ledger.wire.schema import Caller
from origin.generations.resume_token import Voucher
from origin.streams.protocol import within

KEY_MARK = "\x1f"
"""Parts a tenant's name from an idempotency key; neither holds it."""


def tenant_of(caller: Caller | None) -> str:
    """Whose streams it makes and sees; nobody's where the edge knows no keys."""
    return "" if caller is None else caller.tenant


def key_of(caller: Caller | None, idempotency_key: str | None) -> str | None:
    """The idempotency key, apart from other tenants'."""
    tenant = tenant_of(caller)
    if idempotency_key is None or not tenant:
        return idempotency_key
    return f"{tenant}{KEY_MARK}{idempotency_key}"


def name_of(caller: Caller | None, name: str) -> str:
    """The name of an object, apart from other tenants'."""
    return within(tenant_of(caller), name)


async def generation(ledger: Ledger, stream: bytes) -> StreamInfo:
    """The stream; an object's is as if absent, because only its object may show or end it."""
    info = await ledger.info(stream)
    if info.kind is not StreamKind.GENERATION:
        raise unknown_stream(stream)
    return info


def check_right(caller: Caller | None, right: Right) -> None:
    """Raises unless the API key that a caller has used has this right."""
    if caller is None or right in Right(caller.rights):
        return
    if not caller.tenant:
        raise nobody_speaks()
    raise missing(right)


def rights_on(
    stream: bytes, tenant: str, caller: Caller | None, voucher: Voucher | None, right: Right
) -> Right:
    """What a caller may do with a stream of `tenant`; raises unless `right` is among it."""
    is_own = tenant_of(caller) == tenant and (caller is None or bool(caller.tenant))
    own = OF_A_STREAM if caller is None else Right(caller.rights) & OF_A_STREAM
    if voucher is not None:
        if not voucher.is_for(tenant):
            raise unknown_stream(stream)
        # An edge without keys asks for everybody: there a token says all that there is to say.
        return voucher.rights | own if is_own and caller is not None else voucher.rights
    if caller is not None and not caller.tenant:
        raise nobody_speaks()
    if not is_own:
        raise unknown_stream(stream)
    if right not in own:
        raise missing(right)
    return own


def nobody_speaks() -> Unauthorized:
    return Unauthorized(
        "neither an API key nor a resume token speaks for this request",
        code="no_key",
        field="Authorization",
        hint="send Authorization: Bearer KEY, or the stream's Tailrace-Token",
    )


def missing(right: Right) -> Forbidden:
    return Forbidden(f"this API key does not allow to {right.words[0]}", field="Authorization")


def no_subscriptions() -> NotFound:
    return NotFound(
        "there are no subscriptions for tenants",
        code="subscriptions_off",
        hint="use them through an edge without API keys",
    )
