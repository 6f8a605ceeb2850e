"""How somebody is woken, and how who speaks for a wake proves to be the one who was woken.

A wake is a signed POST to a webhook, or an event in a stream of wakes. With it comes a
callback token, `generation.mac`; the mac is HMAC-SHA256 over the subscription's id and the
generation, under a secret of the subscription's own. A token needs no expiry: the lease has
one, and the next wake has another generation.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping
from urllib.parse import quote

import structlog

from ledger.errors import CallerError, Conflict, Unauthorized
from ledger.frame import STREAM_PATH
from ledger.interface import ObjectKey
from ledger.objects.object import ObjectContext, ObjectRequest
from origin.streams.offset import BEGINNING, parse_offset
from origin.subscriptions.index import SIGN
from origin.subscriptions.request import INDEX_KEY, AckBody, Action, HolderBody, parse, url_of
from origin.subscriptions.state import SubscriptionState
from origin.subscriptions.subscription import WakeEvent
from origin.subscriptions.webhook import SIGNATURE, Webhooks

SECRET_BYTES = 32
MAX_TOKEN_CHARS = 128

JSON = "application/json"

log = structlog.get_logger("subscriptions")


def issue(secret: bytes, name: str, generation: int) -> str:
    """The token of one wake of the subscription `name`."""
    said = f"callback\n{generation}\n{name}".encode()
    mac = base64.urlsafe_b64encode(hmac.digest(secret, said, "sha256")).rstrip(b"=")
    return f"{generation}.{mac.decode()}"


def generation_of(secret: bytes, name: str, token: str) -> int:
    """The generation of a token of ours; Unauthorized (TOKEN_INVALID) for any other."""
    number = token.partition(".")[0]
    well_formed = len(token) <= MAX_TOKEN_CHARS and number.isascii() and number.isdigit()
    generation = int(number) if well_formed else 0
    if hmac.compare_digest(token.encode(), issue(secret, name, generation).encode()):
        return generation
    raise Unauthorized("the token is not valid", code="TOKEN_INVALID")


def stream_url(base: str, path: str) -> str:
    return f"{base}{STREAM_PATH}{quote(path)}"


def token_of(name: str, state: SubscriptionState) -> str:
    """What whoever is woken now proves it with."""
    secret = bytes.fromhex(state.config.secret)
    return issue(secret, name, state.standing.generation)


def told_streams(state: SubscriptionState) -> list[dict[str, object]]:
    """The streams as whoever is woken sees them."""
    return [
        {
            "path": link.path,
            "link_type": link.link_type,
            "acked_offset": link.acked,
            "tail_offset": link.tail,
            "has_pending": link.has_pending,
        }
        for link in state.links.told()
    ]


async def call_webhook(
    context: ObjectContext, webhooks: Webhooks, state: SubscriptionState
) -> tuple[WakeEvent, Mapping[str, str]]:
    """Tell the webhook of the wake; how it went, and the offsets that it was told of."""
    name, config, standing = context.key.name, state.config, state.standing
    assert config.webhook_url is not None
    streams = told_streams(state)
    fields = {
        "subscription_id": name,
        "wake_id": standing.wake_id,
        "generation": standing.generation,
        "streams": streams,
        "callback_url": url_of(config.base, name, Action.CALLBACK),
        "callback_token": token_of(name, state),
    }
    body = json.dumps(fields).encode()
    signed = await context.call(INDEX_KEY, ObjectRequest(SIGN, config.base, body=body))
    assert isinstance(signed.body, bytes)
    headers = {"content-type": JSON, SIGNATURE: signed.body.decode()}
    delivery = await context.outside(webhooks.post(config.webhook_url, body, headers))
    told = {str(stream["path"]): str(stream["tail_offset"]) for stream in streams}
    if not delivery.taken:
        log.warning("webhook.failed", subscription=name, reason=delivery.reason)
        return WakeEvent.FAILED, told
    return WakeEvent.DONE if delivery.done else WakeEvent.DELIVERED, told


async def write_wake(context: ObjectContext, state: SubscriptionState) -> None:
    """Append the wake to the stream that workers read; without one they can only ask."""
    name, config = context.key.name, state.config
    assert config.wake_stream is not None
    event = {
        "type": "wake",
        "subscription_id": name,
        "stream": state.links.first_pending or "",
        "generation": state.standing.generation,
        "ts": context.now_ms(),
    }
    request = ObjectRequest(
        "POST",
        stream_url(config.base, config.wake_stream),
        (("content-type", JSON),),
        json.dumps(event).encode(),
    )
    response = await context.call(ObjectKey("stream", config.wake_stream), request)
    if response.status >= 400:
        log.warning(
            "wake.not_written",
            subscription=name,
            stream=config.wake_stream,
            status=response.status,
        )


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
