"""The rights of callers on streams. Also separates the objects and idempotency keys of tenants.

An API key, which the edge has checked, gives rights on all streams of its tenant. A resume token
gives rights on one stream. Streams of other tenants are treated as absent.
"""

from __future__ import annotations

from tailrace.ledger.errors import Forbidden, NotFound, Unauthorized, unknown_stream
from tailrace.ledger.frame import Caller
from tailrace.ledger.interface import Ledger, StreamInfo, StreamKind
from tailrace.ledger.links.rights import OF_A_STREAM, Right
from tailrace.origin.core.quotas import tenant_of
from tailrace.origin.generations.resume_tokens import VerifiedToken
from tailrace.origin.streams.protocol import within

KEY_MARK = "\x1f"
"""Separator between a tenant's name and an idempotency key, neither of which contains it."""

PIPELINES = "pipelines:"
"""Beginning of the tenants that streams inside pipelines belong to. A tenant of API keys has no
colon in its name, so no client can read them."""


def key_of(caller: Caller | None, idempotency_key: str | None) -> str | None:
    """Return an idempotency key with the caller's tenant as prefix, so each tenant has its own."""
    tenant = tenant_of(caller)
    if idempotency_key is None or not tenant:
        return idempotency_key
    return f"{tenant}{KEY_MARK}{idempotency_key}"


def name_of(caller: Caller | None, name: str) -> str:
    """Return an object's name with the caller's tenant as prefix, so each tenant has its own."""
    return within(tenant_of(caller), name)


async def generation(ledger: Ledger, stream: bytes) -> StreamInfo:
    """Return a stream that is a generation.

    Raises `NotFound` for an unknown stream and for a stream of an object, which only the object
    itself may serve.
    """
    info = await ledger.info(stream)
    if info.kind is not StreamKind.GENERATION:
        raise unknown_stream(stream)
    return info


def check_right(caller: Caller | None, right: Right) -> None:
    """Raise `Forbidden` or `Unauthorized` unless a caller's API key has this right."""
    if caller is None or right in Right(caller.rights):
        return
    if not caller.tenant:
        raise nobody_speaks()
    raise missing(right)


def rights_on(
    stream: bytes, tenant: str, caller: Caller | None, token: VerifiedToken | None, right: Right
) -> Right:
    """Return the rights of a caller on a stream of `tenant`, which must include `right`.

    Raises:
        NotFound: The stream is another tenant's.
        Forbidden: The API key does not include the right.
        Unauthorized: The request has neither an API key nor a resume token.
    """
    is_own = tenant_of(caller) == tenant and (caller is None or bool(caller.tenant))
    own = OF_A_STREAM if caller is None else Right(caller.rights) & OF_A_STREAM
    if token is not None:
        if not token.is_for(tenant):
            raise unknown_stream(stream)
        # An edge without API keys sends no caller. Then only the resume token gives rights.
        return token.rights | own if is_own and caller is not None else token.rights
    if caller is not None and not caller.tenant:
        raise nobody_speaks()
    if not is_own:
        raise unknown_stream(stream)
    if right not in own:
        raise missing(right)
    return own


def nobody_speaks() -> Unauthorized:
    return Unauthorized(
        "this request has neither an API key nor a resume token",
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
