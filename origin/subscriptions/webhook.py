"""POSTs to webhooks, and keeps them away from what is not on the public internet.

A webhook's URL is a stranger's word about where this process shall connect. So the host's
addresses are looked up once, checked, and the connection is made to a checked address: a name
that means another one a moment later (DNS rebinding) changes nothing. No redirect is followed
and no proxy is used. Deliveries have places in a bounded pool of their own, where a host that does
not answer takes nothing from the others, and nothing that an answer holds is unpacked.

A look-up cannot be stopped, and one whose name servers are silent takes as long as they let
it. So look-ups have threads of their own: one must not hold a thread that something else
waits for, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

from tailrace.ledger.errors import CallerError, Unavailable
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitBreaker, CircuitState
from tailrace.ledger.process.settings import MAX_PORT

FAILURES = 3
"""Deliveries to a host, one after the other, that get no answer before it is left alone."""
FIRST_PAUSE_S = 10.0
"""Minimum time for which it is left alone; up to twice as long, and longer after each trial that
fails."""
MAX_PAUSE_S = 600.0

MAX_DELIVERIES = 256
"""Under way at the same time; a half of them for hosts whose last delivery got no answer."""
MAX_DELIVERIES_PER_HOST = 4
"""Under way to one host at the same time."""
MAX_HOSTS = 4_096
"""Hosts whose failures are remembered; the one that has failed longest ago is forgotten."""

MAX_LOOK_UPS = 32
"""Under way at the same time, those included that nobody waits for any more."""

TIMEOUT_S = 15.0
"""For one delivery, from the look-up to the end of the answer."""
CONNECT_TIMEOUT_S = 5.0
"""Each for a TCP connection and for TLS on it."""
MAX_ANSWER_BYTES = 64 << 10
SIGNATURE = "webhook-signature"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, for a port; OSError if it has none."""

_HOST_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are IPv4
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that has been assigned to the public internet (RFC 4291, 2.4; IANA's registry).
Everything else holds IPv4 addresses in another spelling, SIIT's `::ffff:0:a.b.c.d` among them, or
is local, whatever Python says of it."""
_AZURE_HOST = ipaddress.ip_address("168.63.129.16")
"""The host of Azure's machines, which Python takes for a public address."""


class Resting(Unavailable):
    """The host has not answered lately, and is left alone for now."""


@dataclass(slots=True)
class Host:
    """A host, with its deliveries under way. Any answer, also an error, says that it is there."""

    breaker: CircuitBreaker = field(
        default_factory=lambda: CircuitBreaker(FAILURES, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S))
    )
    running: int = 0

    @property
    def most(self) -> int:
        """Maximum deliveries at the same time: one while the host is on trial."""
        return 1 if self.breaker.state is CircuitState.HALF_OPEN else MAX_DELIVERIES_PER_HOST

    def ended(self, *, answered: bool, now: float) -> None:
        """Note how a delivery went."""
        if answered:
            self.breaker.reset()
        else:
            self.breaker.failed(now)


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the pool, or in its queue; who holds it says whether the host has answered."""

    host: str
    granted: asyncio.Future[None]
    running: bool = False
    failing: bool = False
    """The last delivery to the host had no answer."""
    answered: bool | None = None


class HostPool:
    """Slots, given in the order of coming to those whose host may have one.

    Whose host has failed comes after the others, and has half of the places at most: those
    who answer wait for none who do not.
    """

    def __init__(self, now_ms: Callable[[], int], size: int = MAX_DELIVERIES) -> None:
        self._now_ms = now_ms
        self._size = size
        self._hosts: dict[str, Host] = {}
        self._running = 0
        self._failing = 0
        self._waiting: dict[Slot, None] = {}

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[Slot]:
        """A place to deliver to `host`, once there is one; Resting if it is left alone."""
        slot = Slot(host, asyncio.get_running_loop().create_future())
        self._waiting[slot] = None
        self._grant()
        try:
            await slot.granted
            yield slot
        finally:
            self._waiting.pop(slot, None)
            if slot.running:
                self._leave(slot)
                self._grant()

    def _grant(self) -> None:
        for failing in (False, True):
            for slot in tuple(self._waiting):
                host = self._hosts.setdefault(slot.host, Host())
                if failing != (host.breaker.failures > 0) or slot.granted.done():
                    continue
                if not host.breaker.allows(self._now_ms() / 1000):
                    del self._waiting[slot]
                    slot.granted.set_exception(Resting(f"{slot.host} has not answered lately"))
                elif self._has_room(host, failing=failing):
                    self._enter(slot, host, failing=failing)

    def _has_room(self, host: Host, *, failing: bool) -> bool:
        return (
            self._running < self._size
            and host.running < host.most
            and not (failing and self._failing >= self._size // 2)
        )

    def _enter(self, slot: Slot, host: Host, *, failing: bool) -> None:
        del self._waiting[slot]
        slot.running, slot.failing = True, failing
        self._running += 1
        self._failing += failing
        host.running += 1
        slot.granted.set_result(None)

    def _leave(self, slot: Slot) -> None:
        host = self._hosts.pop(slot.host)
        self._running -= 1
        self._failing -= slot.failing
        host.running -= 1
        if slot.answered is not None:
            host.ended(answered=slot.answered, now=self._now_ms() / 1000)
        if host.running or host.breaker.failures:
            self._hosts[slot.host] = host  # the last to be forgotten
        if len(self._hosts) > MAX_HOSTS:
            idle = next((name for name, host in self._hosts.items() if not host.running), None)
            self._hosts.pop(idle or "", None)


class Resolver:
    """`look_up` raises OSError for a host without an address."""

    def __init__(self, most: int = MAX_LOOK_UPS) -> None:
        self._free = asyncio.Semaphore(most)

    async def look_up(self, host: str, port: int) -> list[str]:
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()  # whether anybody waits for it or not

        def work() -> None:
            try:
                there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found.set_result([str(address[0]).partition("%")[0] for *_, address in there])
            except OSError as error:
                found.set_exception(error)
            except UnicodeError as error:
                found.set_exception(OSError(f"no name of a host: {error}"))
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._free.release)

        threading.Thread(target=work, name="webhook-look-up", daemon=True).start()
        return await asyncio.wrap_future(found)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a POST went: `taken` with a 2xx, `done` if its answer says so.

    `answered` if there was an answer, whatever it said.
    """

    taken: bool
    done: bool = False
    reason: str = ""
    answered: bool = False


class Webhooks:
    """`hosts` may be called although they are private, or without TLS.

    `resolve` looks hosts up, `tls` says whose certificates are believed (the usual ones),
    `now_ms` is Unix time.
    """

    def __init__(
        self,
        hosts: Iterable[str] = (),
        *,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._resolve = resolve or Resolver().look_up
        self._pool = HostPool(now_ms)
        self._tls = tls
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def check(self, text: str) -> httpx.URL:
        """The URL, if a webhook may have it; CallerError (WEBHOOK_URL_REJECTED) if not."""
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise _rejected(f"not a URL: {error}") from None
        if url.scheme not in ("http", "https") or url.userinfo or (url.port or 0) > MAX_PORT:
            raise _rejected("not a plain https URL")
        address = _literal(url.host)
        if address is None and not _HOST_NAME.fullmatch(url.raw_host.decode("ascii")):
            raise _rejected("not the name of a host")
        if url.host.lower() in self._hosts:
            return url
        if url.scheme != "https":
            raise _rejected("only https is called")
        if address is not None and not is_public(address):
            raise _rejected("the address is not a public one")
        return url

    async def post(self, text: str, body: bytes, headers: dict[str, str]) -> Delivery:
        """Deliver; whatever goes wrong is a reason, not an error."""
        try:
            url = self.check(text)
            async with self._pool.slot(url.host.lower()) as slot:
                delivery = await self._deliver(url, body, headers)
                slot.answered = delivery.answered
                return delivery
        except (CallerError, Resting) as error:
            return Delivery(False, reason=str(error))

    async def _deliver(self, url: httpx.URL, body: bytes, headers: dict[str, str]) -> Delivery:
        http = self._http()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(http, url, body, headers)
        except TimeoutError:
            return Delivery(False, reason=f"no answer within {self._timeout_s:g} s")
        except (httpx.HTTPError, OSError, CallerError) as error:
            return Delivery(False, reason=str(error) or type(error).__name__)

    async def _post(
        self, http: httpx.AsyncClient, url: httpx.URL, body: bytes, headers: dict[str, str]
    ) -> Delivery:
        address = await self._checked_address(url)
        request = http.build_request(
            "POST",
            url.copy_with(host=str(address), fragment=None),
            content=body,
            headers=headers | {"host": url.netloc.decode("ascii"), "accept-encoding": "identity"},
            # The certificate is that of the name, whatever address it is at.
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        response = await http.send(request, stream=True)
        try:
            if not response.is_success:
                return Delivery(False, reason=f"HTTP status {response.status_code}", answered=True)
            return Delivery(True, done=_says_done(await _read(response)), answered=True)
        finally:
            await response.aclose()

    async def _checked_address(self, url: httpx.URL) -> Address:
        host = url.raw_host.decode("ascii")
        port = url.port or (443 if url.scheme == "https" else 80)
        literal = _literal(url.host)
        there = [url.host] if literal is not None else await self._resolve(host, port)
        found = [ipaddress.ip_address(text) for text in there]
        if not found:
            raise OSError(f"{url.host} has no address")
        if url.host.lower() not in self._hosts and not all(map(is_public, found)):
            raise _rejected(f"{url.host} is at an address that is not a public one")
        return found[0]

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            # Connections are not kept: one to an address is not for every name at it.
            limits = httpx.Limits(max_connections=MAX_DELIVERIES, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                verify=self._tls or True,
                timeout=httpx.Timeout(self._timeout_s, connect=CONNECT_TIMEOUT_S),
                limits=limits,
                trust_env=False,
                follow_redirects=False,
            )
        return self._client


def is_public(address: Address) -> bool:
    """Return True if everybody may connect there, so that connecting reveals nothing."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _GLOBAL_UNICAST:
            return False
    return address != _AZURE_HOST and address.is_global and not address.is_multicast


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _read(response: httpx.Response) -> bytes:
    """What there is of an answer, as far as we want to know it: nothing of an encoded one."""
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        return b""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            return b""
    return bytes(body)


def _says_done(body: bytes) -> bool:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.get("done") is True


def _rejected(why: str) -> CallerError:
    return CallerError(
        why,
        code="WEBHOOK_URL_REJECTED",
        field="webhook.url",
        hint="https to a public host, or a host of [streams] webhook_hosts",
    )
