"""Where webhooks may lead: checked as text, as addresses, and on real connections."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.ledger.errors import CallerError
from tailrace.origin.subscriptions.webhook import (
    FAILURES,
    FIRST_PAUSE_S,
    MAX_ANSWER_BYTES,
    Resolver,
    Webhooks,
    is_public,
)
from tailrace.up import development_certificate
from tests.origin.subscriptions.subscription_world import Receiver

pytestmark = pytest.mark.anyio


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with made.listening():
        yield made


def resolving(*addresses: str) -> Callable[[str, int], Awaitable[list[str]]]:
    async def resolve(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return resolve


# ---- as text ----


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "http://public.example/hook",
        "http://localhost/",
        "http://127.0.0.1:80/",
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://100.64.0.1/",
        "https://0.0.0.0/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://[::1]/",
        "https://[fe80::1]/",
        "https://[fd00::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:a00:1::]/",
        "https://168.63.129.16/",
        "https://[64:ff9b::a83f:8110]/",
        "https://[64:ff9b:1::808:808]/",
        "https://[::8.8.8.8]/",
        "https://[fec0::1]/",
        "https://user:secret@public.example/",
        "https:///hook",
        "ftp://public.example/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "//public.example/",
        "public.example",
        "https://[::1",
        "https://public.example:99999/",
        "https://a b/",
    ],
)
def test_a_url_that_leads_inside_is_refused(url: str) -> None:
    with pytest.raises(CallerError) as caught:
        Webhooks().check(url)
    assert (caught.value.code, caught.value.status) == ("WEBHOOK_URL_REJECTED", 400)


@pytest.mark.parametrize(
    "url",
    [
        "https://public.example/hook?x=1",
        "https://public.example:8443/",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
    ],
)
def test_a_public_host_may_be_called_over_tls(url: str) -> None:
    assert Webhooks().check(url) == url


def test_hosts_that_are_allowed_may_be_private_and_without_tls() -> None:
    webhooks = Webhooks(["127.0.0.1", "Inside.Example"])
    for url in ("http://127.0.0.1:9/x", "http://inside.example/", "https://INSIDE.example/"):
        webhooks.check(url)
    for url in ("http://127.0.0.2/", "http://localhost/", "http://x.inside.example/"):
        with pytest.raises(CallerError):
            webhooks.check(url)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b::7f00:1", False),
        ("2002:808:808::", True),
        ("2002:7f00:1::", False),
        ("2001:0:1::", False),
        ("::ffff:0:10.0.0.1", False),  # SIIT (RFC 7915)
        ("::ffff:0:8.8.8.8", False),
        ("::10.0.0.1", False),
        ("64:ff9b:1::808:808", False),
        ("fec0::1", False),
        ("5f00::1", False),
        ("2606:4700::1111", True),
        ("ff02::1", False),
        ("239.255.255.250", False),
    ],
)
def test_an_address_within_an_address_is_looked_at(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) == public


# ---- on the way ----


async def test_a_body_is_delivered_as_it_is(receiver: Receiver) -> None:
    webhooks = Webhooks(["127.0.0.1"])
    delivery = await webhooks.post(receiver.url, b'{"a":1}', {"webhook-signature": "s"})
    assert (delivery.taken, delivery.done) == (True, False)
    [post] = receiver.posts
    assert (post.body, post.headers["webhook-signature"]) == (b'{"a":1}', "s")
    assert post.headers["host"] == f"127.0.0.1:{receiver.port}"
    await webhooks.aclose()


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        (b'{"done":true}', True),
        (b'{"done":"true"}', False),
        (b'{"done":1}', False),
        (b"[true]", False),
        (b"", False),
        (b"\xff", False),
        (b"[" * 50_000, False),
        (b'{"done":true}' + b" " * MAX_ANSWER_BYTES, False),
    ],
)
async def test_only_a_plain_done_is_one(receiver: Receiver, answer: bytes, done: bool) -> None:
    receiver.answer = answer
    webhooks = Webhooks(["127.0.0.1"])
    delivery = await webhooks.post(receiver.url, b"{}", {})
    assert (delivery.taken, delivery.done) == (True, done)
    await webhooks.aclose()


async def test_an_encoded_answer_is_not_unpacked(receiver: Receiver) -> None:
    """Half a megabyte of it could be gigabytes."""
    receiver.answer = gzip.compress(b'{"done":true}')
    receiver.head = "content-encoding: gzip\r\n"
    webhooks = Webhooks(["127.0.0.1"])
    delivery = await webhooks.post(receiver.url, b"{}", {})
    assert (delivery.taken, delivery.done) == (True, False)
    assert receiver.posts[0].headers["accept-encoding"] == "identity"
    await webhooks.aclose()


async def test_a_host_that_does_not_answer_is_left_alone_for_a_while(receiver: Receiver) -> None:
    now = 0
    webhooks = Webhooks(["127.0.0.1"], now_ms=lambda: now)
    for _ in range(FAILURES):
        assert not (await webhooks.post("http://127.0.0.1:1/", b"{}", {})).taken
    assert "lately" in (await webhooks.post(receiver.url, b"{}", {})).reason
    now = round(2000 * FIRST_PAUSE_S)
    assert (await webhooks.post(receiver.url, b"{}", {})).taken
    await webhooks.aclose()


async def test_a_look_up_that_takes_long_holds_no_thread_that_others_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled, names = threading.Event(), list[str]()

    def getaddrinfo(host: str, port: int, type: int) -> list[tuple[object, ...]]:
        names.append(host)
        if host == "silent.invalid":
            stalled.wait()
        return [(0, type, 0, "", ("192.0.2.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolver = Resolver(most=9)
    silent = [asyncio.create_task(resolver.look_up("silent.invalid", 443)) for _ in range(8)]
    try:
        assert await resolver.look_up("quick.invalid", 443) == ["192.0.2.1"]
        assert await asyncio.to_thread(lambda: "here") == "here"
        silent[0].cancel()  # its thread is still counted
        silent.append(asyncio.create_task(resolver.look_up("silent.invalid", 443)))
        last = asyncio.create_task(resolver.look_up("last.invalid", 443))
        await asyncio.wait([silent[0]])
        assert not last.done() and "last.invalid" not in names
    finally:
        stalled.set()
    assert await last == ["192.0.2.1"]
    await asyncio.wait(silent)


async def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.status, receiver.head = 307, f"location: {receiver.url}/other\r\n"
    webhooks = Webhooks(["127.0.0.1"])
    delivery = await webhooks.post(receiver.url, b"{}", {})
    assert (delivery.taken, delivery.reason) == (False, "HTTP status 307")
    assert len(receiver.posts) == 1
    await webhooks.aclose()


async def test_a_name_that_has_come_to_mean_a_private_address_is_not_connected_to(
    receiver: Receiver,
) -> None:
    for addresses in (("127.0.0.1",), ("8.8.8.8", "127.0.0.1"), ("::1",)):
        webhooks = Webhooks(resolve=resolving(*addresses))
        url = f"https://public.example:{receiver.port}/hook"
        delivery = await webhooks.post(url, b"{}", {})
        assert not delivery.taken
        assert "not on the public internet" in delivery.reason
        await webhooks.aclose()
    assert receiver.posts == []


async def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver) -> None:
    """The name itself does not exist: nobody looks it up a second time."""
    webhooks = Webhooks(["inside.invalid"], resolve=resolving("127.0.0.1"))
    url = f"http://inside.invalid:{receiver.port}/hook"
    assert (await webhooks.post(url, b"{}", {})).taken
    assert receiver.posts[0].headers["host"] == f"inside.invalid:{receiver.port}"
    await webhooks.aclose()


async def test_whatever_goes_wrong_on_the_way_is_a_reason(receiver: Receiver) -> None:
    async def no_such_host(_host: str, _port: int) -> list[str]:
        raise OSError("no such host")

    for webhooks, url in (
        (Webhooks(["x.invalid"], resolve=no_such_host), "http://x.invalid/"),
        (Webhooks(["x.invalid"], resolve=resolving()), "http://x.invalid/"),
        (Webhooks(["127.0.0.1"]), "http://127.0.0.1:1/"),
        (Webhooks(), receiver.url),
    ):
        delivery = await webhooks.post(url, b"{}", {})
        assert not delivery.taken
        assert delivery.reason
        await webhooks.aclose()


async def test_the_certificate_has_to_be_that_of_the_name_not_of_the_address(
    tmp_path: Path,
) -> None:
    files = development_certificate(tmp_path, datetime.now(UTC))  # for localhost and 127.0.0.1
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(files.certificate, files.key)
    trusting = ssl.create_default_context(cafile=files.certificate)
    receiver = Receiver()
    async with receiver.listening(served):
        webhooks = Webhooks(
            ["localhost", "other.invalid"], resolve=resolving("127.0.0.1"), tls=trusting
        )
        assert (await webhooks.post(f"https://localhost:{receiver.port}/", b"{}", {})).taken
        other = await webhooks.post(f"https://other.invalid:{receiver.port}/", b"{}", {})
        assert "certificate" in other.reason
        await webhooks.aclose()
    assert len(receiver.posts) == 1


async def test_a_webhook_that_does_not_answer_is_given_up(receiver: Receiver) -> None:
    receiver.open.clear()
    webhooks = Webhooks(["127.0.0.1"], timeout_s=0.05)
    delivery = await webhooks.post(receiver.url, b"{}", {})
    assert (delivery.taken, delivery.reason) == (False, "no answer within 0.05 s")
    receiver.open.set()
    await webhooks.aclose()


async def test_a_host_that_speaks_no_tls_is_not_spoken_to_without() -> None:
    heard: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65_536))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    webhooks = Webhooks(["127.0.0.1"])
    with closing(server):
        delivery = await webhooks.post(f"https://127.0.0.1:{port}/", b"secret", {})
    assert not delivery.taken
    assert b"secret" not in b"".join(heard)
    await webhooks.aclose()
