"""How somebody is woken: a signed POST to a webhook, or an event in a stream of wakes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import quote

import structlog

from ledger.interface import ObjectKey
from ledger.objects.object import ObjectContext, ObjectRequest
from ledger.subscriptions.index import SIGN
from ledger.subscriptions.route import INDEX_KEY, Action, url_of
from ledger.subscriptions.state import SubscriptionState
from ledger.subscriptions.subscription import Event
from ledger.subscriptions.token import issue
from ledger.subscriptions.webhook import SIGNATURE, Webhooks

JSON = "application/json"
STREAM_ROOT = "/v1/stream/"

log = structlog.get_logger("subscriptions")


def stream_url(base: str, path: str) -> str:
    return f"{base}{STREAM_ROOT}{quote(path)}"


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
) -> tuple[Event, Mapping[str, str]]:
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
        return Event.FAILED, told
    return Event.DONE if delivery.done else Event.DELIVERED, told


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
