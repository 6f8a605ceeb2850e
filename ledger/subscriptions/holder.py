"""Whether who speaks for a wake is the one who was woken, and may say what it says."""

from __future__ import annotations

from ledger.errors import CallerError, Conflict, Unauthorized
from ledger.objects.object import ObjectRequest
from ledger.streams.offset import BEGINNING, parse_offset
from ledger.subscriptions.request import AckBody, HolderBody, parse
from ledger.subscriptions.state import SubscriptionState
from ledger.subscriptions.token import generation_of


def holder_of(name: str, state: SubscriptionState, request: ObjectRequest) -> HolderBody:
    """What the holder says; Unauthorized or Conflict (FENCED) if it is not the holder."""
    scheme, _, token = (request.header("authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("a bearer token is needed", code="TOKEN_INVALID")
    generation = generation_of(bytes.fromhex(state.config.secret), name, token)
    said = parse(HolderBody, request.body)
    standing = state.standing
    named = (said.generation, said.wake_id)
    if said.wake_id is None or named != (generation, standing.wake_id):
        raise Conflict("another wake has come since", code="FENCED")
    if generation != standing.generation:
        raise Conflict("another wake has come since", code="FENCED")
    return said


def check_ack(state: SubscriptionState, ack: AckBody) -> None:
    """Conflict (INVALID_OFFSET) unless the stream is linked and reaches so far."""
    link = state.links.get(ack.name)
    if link is None:
        raise Conflict(f"{ack.name!r} is not subscribed to", code="INVALID_OFFSET")
    try:
        offset = None if ack.offset == BEGINNING else parse_offset(ack.offset)
    except CallerError:
        offset = None
    if offset is None or not link.acked <= ack.offset <= link.tail:
        raise Conflict(
            f"{ack.offset!r} is no offset from {link.acked} to {link.tail}", code="INVALID_OFFSET"
        )
