"""Sends webhooks, and only to addresses on the public internet.

Clients choose the URLs of webhooks, and could choose hosts in the operator's network (SSRF). So the
host's addresses are looked up once and checked, and the connection is made to a checked address: a
name that changes its address afterwards (DNS rebinding) has no effect. Redirects are not followed
and proxies not used. Deliveries share a bounded pool, in which a host that does not answer does not
delay others; encoded answers are not decoded.

A look-up cannot be cancelled, and takes as long as silent name servers let it. So look-ups have
threads of their own, which block neither other work nor the end of the process.
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
"""Number of consecutive deliveries without an answer after which a host is paused."""
FIRST_PAUSE_S = 10.0
"""Minimum duration in seconds of a host's first pause. The pause is random, up to twice as long.
Each failed trial delivery makes the next pause longer."""
MAX_PAUSE_S = 600.0

MAX_DELIVERIES = 256
"""Maximum deliveries at a time; half of them for hosts whose last delivery got no answer."""
MAX_DELIVERIES_PER_HOST = 4
"""Maximum deliveries to one host at a time."""
MAX_HOSTS = 4_096
"""Maximum hosts whose failures are remembered; the oldest failure is forgotten first."""

MAX_LOOK_UPS = 32
"""Maximum look-ups at a time, including abandoned ones."""

TIMEOUT_S = 15.0
"""Timeout in seconds for one delivery, from the look-up to the end of the answer."""
CONNECT_TIMEOUT_S = 5.0
"""Timeout in seconds for a TCP connection, and for TLS on it."""
MAX_ANSWER_BYTES = 64 << 10
SIGNATURE = "webhook-signature"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Function that looks up a host's addresses; raises OSError if it has none."""

_HOST_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is assigned to the public internet (RFC 4291, 2.4; IANA's registry).

The rest embeds IPv4 addresses, such as SIIT's `::ffff:0:a.b.c.d`, or is local, even where Python
disagrees.
"""
_AZURE_HOST = ipaddress.ip_address("168.63.129.16")
"""Azure's host address, which Python considers public."""


class Resting(Unavailable):
    """An error for a delivery to a host that is paused, because it has not answered lately."""


@dataclass(slots=True)
class Host:
    """A host and its running deliveries. Any answer, even an error, shows that it is alive."""

    breaker: CircuitBreaker = field(
        default_factory=lambda: CircuitBreaker(FAILURES, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S))
    )
    running: int = 0

    @property
    def most(self) -> int:
        """Maximum deliveries at a time: one while the host is on trial."""
        return 1 if self.breaker.state is CircuitState.HALF_OPEN else MAX_DELIVERIES_PER_HOST

    def ended(self, *, answered: bool, now: float) -> None:
        """Record the result of a delivery."""
        if answered:
            self.breaker.reset()
        else:
            self.breaker.failed(now)


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one delivery, in the pool or in its queue.

    The caller of `HostPool.slot` sets `answered` if the delivery was carried out.
    """

    host: str
    granted: asyncio.Future[None]
    running: bool = False
    failing: bool = False
    """True if the last delivery to the host had no answer."""
    answered: bool | None = None


class HostPool:
    """Limits the deliveries that run at a time, in total and to each host.

    Waiting deliveries get slots in their order of arrival, if the limit of their host allows it.
    Hosts that failed come after the others, and get at most half of the slots, so that healthy
    hosts never wait for them.
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
        """Wait for a slot for `host`; raises Resting if the host is paused."""
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
            self._hosts[slot.host] = host  # at the end: the first hosts are forgotten first
        if len(self._hosts) > MAX_HOSTS:
            idle = next((name for name, host in self._hosts.items() if not host.running), None)
            self._hosts.pop(idle or "", None)


class Resolver:
    """Looks up hosts; `look_up` raises OSError for a host without an address."""

    def __init__(self, most: int = MAX_LOOK_UPS) -> None:
        self._free = asyncio.Semaphore(most)

    async def look_up(self, host: str, port: int) -> list[str]:
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()  # a cancelled caller does not cancel `found`

        def work() -> None:
            try:
                there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found.set_result([str(address[0]).partition("%")[0] for *_, address in there])
            except OSError as error:
                found.set_exception(error)
            except UnicodeError as error:
                found.set_exception(OSError(f"not a valid host name: {error}"))
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._free.release)

        threading.Thread(target=work, name="webhook-look-up", daemon=True).start()
        return await asyncio.wrap_future(found)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of a POST.

    `taken`: the answer's status was 2xx. `done`: the answer says that the subscriber has already
    handled all data that the POST named.
    `answered`: the host sent an answer of any kind.
    """

    taken: bool
    done: bool = False
    reason: str = ""
    answered: bool = False


class Webhooks:
    """Sends webhooks. The hosts in `hosts` may have private addresses and need no TLS.

    `resolve` looks hosts up, `tls` gives trusted certificates (default: the usual ones), `now_ms`
    is Unix time.
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
        """Return the URL if webhooks may be sent to it.

        Raises CallerError (WEBHOOK_URL_REJECTED) if not.
        """
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise _rejected(f"not a URL: {error}") from None
        if url.scheme not in ("http", "https") or url.userinfo or (url.port or 0) > MAX_PORT:
            raise _rejected("must be an https URL without user name and password")
        address = _literal(url.host)
        if address is None and not _HOST_NAME.fullmatch(url.raw_host.decode("ascii")):
            raise _rejected("the name of the host is not valid")
        if url.host.lower() in self._hosts:
            return url
        if url.scheme != "https":
            raise _rejected("the scheme is not https")
        if address is not None and not is_public(address):
            raise _rejected("the address is not on the public internet")
        return url

    async def post(self, text: str, body: bytes, headers: dict[str, str]) -> Delivery:
        """Send a POST to a webhook; an error is returned as `Delivery.reason`, not raised."""
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
            # The URL has an address, but the certificate must match the host's name.
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
            raise _rejected(f"{url.host} has an address that is not on the public internet")
        return found[0]

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            # Connections are not reused: they are pooled by address, but belong to one host name.
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
    """Return True if an address is public, so that clients may make this process connect to it."""
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
    """Read the body of an answer; empty if it is encoded or too long."""
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
        hint="use https to a public host, or add the host to [streams] webhook_hosts",
    )
