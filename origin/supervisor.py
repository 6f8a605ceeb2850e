"""The supervisor of an origin: ledger, link server and worker slots in one process. No torch.

`tailrace.origin.start` imports this after it has started the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.ledger.errors import ConfigError, Damaged, LedgerFailed, TailraceError, Unavailable
from tailrace.ledger.frame import encode
from tailrace.ledger.interface import Ledger
from tailrace.ledger.links.transport import UNIX, listen, os_reason
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.process.lifecycle import Stop, limit_closing
from tailrace.ledger.process.tasks import first_of
from tailrace.ledger.telemetry.exposition import exposed
from tailrace.ledger.telemetry.traces import Traces
from tailrace.origin.admin.handler import AdminHandler
from tailrace.origin.admin.streams import LivePages, unix_clock
from tailrace.origin.config import LedgerConfig, OriginConfig, PipelineConfig, StreamsConfig
from tailrace.origin.edges.link import EdgeLink
from tailrace.origin.edges.peers import PeerTransport
from tailrace.origin.generations.resume_tokens import TokenKeys
from tailrace.origin.generations.runs import Runs
from tailrace.origin.generations.service import Service
from tailrace.origin.gpu.meter import GpuMeter
from tailrace.origin.metrics import Metrics
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.objects.operator_classes import load_classes
from tailrace.origin.open_ledger import open_ledger
from tailrace.origin.pool.history.recorder import recorder_of
from tailrace.origin.serving.model_host import ModelHost, Readers, live_pool, single_pool
from tailrace.origin.serving.plan import KnownModels, ModelPlan, pipelines_of
from tailrace.origin.steady_clock import KeptClock, now_ms
from tailrace.origin.workers.kernel_cache import KernelCache
from tailrace.origin.workers.program import makes_tokens
from tailrace.origin.workers.worker_process import WorkerSlot

if TYPE_CHECKING:
    from tailrace.origin.checkpoint.prompt import PromptReader

ADOPT_S = 0.5
"""Interval in seconds at which the supervisor looks for streams of dead origins to continue, and
for unread streams."""

LOOK_S = 0.05
"""Interval in seconds at which a draining origin checks whether its streams have ended."""

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")

log = structlog.get_logger("origin")


async def serve(
    config: OriginConfig,
    retention: LedgerConfig,
    streams: StreamsConfig,
    slots: Sequence[WorkerSlot],
    running: Sequence[asyncio.Task[Any]],
    stop: Stop,
    several: Sequence[ModelPlan] = (),
    socket: Path | None = None,
) -> None:
    """Serve until `stop`, or until one of the tasks `running` or a part of the supervisor ends.

    The models in `several` are served, or, if it is empty, the one of `config`. The workers of
    pipelines read other streams at the Unix socket `socket`. When serving has ended, the process
    must end soon, or `limit_closing` ends it.
    """
    own = load_classes(config.objects)
    readers = {plan.name: _reader_of(plan.config) for plan in several} or {"": _reader_of(config)}
    clock = KeptClock(config.data)
    ledger = await open_ledger(retention, config.data, clock, config.reached_at)
    clock.keep()
    credentials = config.link_credentials
    secrets = TokenKeys.load(config.keys_path).peer_secrets(credentials.secret)
    transport = PeerTransport(config.link_address.scheme, credentials, secrets)
    objects = OriginObjects(ledger, streams, clock, transport=transport, own=own)
    try:
        supervisor = Supervisor(
            config, retention, ledger, objects, clock, slots=slots, readers=readers, plans=several
        )
        await supervisor.serve(running, stop, socket, closing=limit_closing)
    finally:
        await objects.close()
        await ledger.close()


def _reader_of(config: OriginConfig) -> PromptReader | None:
    """Return the tokenizer of a model's prompts; None if its workers are of kind `text`."""
    if not makes_tokens(config):
        return None
    # Imported late: it needs packages of the extra `torch`, which an origin that serves only an
    # upstream server may lack.
    from tailrace.origin.checkpoint.prompt import PromptReader

    return PromptReader(config.model, open_objects=config.open_objects)


class Supervisor:
    """Wires the parts of an origin together and keeps them running.

    The models in `plans` are served, or, if it is empty, the one of `config`. `clock_s` and `pace`
    set the clock of the model pool and its speed, so that a recorded day can be replayed in a
    minute.
    """

    def __init__(
        self,
        config: OriginConfig,
        retention: LedgerConfig,
        ledger: Ledger,
        objects: OriginObjects,
        clock: KeptClock,
        *,
        slots: Sequence[WorkerSlot] = (),
        readers: Readers | None = None,
        plans: Sequence[ModelPlan] = (),
        clock_s: Callable[[], float] = time.monotonic,
        pace: float = 1.0,
    ) -> None:
        """Create all parts; nothing runs before `serve`."""
        self._config = config
        self._clock = clock
        self._retention = retention
        self._ledger = ledger
        self._objects = objects
        self._links: set[EdgeLink] = set()
        self._told_damage = ""  # the last error about a damaged ledger that was logged
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._metrics = Metrics(
            traces=Traces.open(config.traces, "tailrace-origin", "origin.traces"),
            promised_s=config.slo_s,
        )
        objects.chats.begun = self._metrics.chat_turns.inc
        self._metrics.chat_readers.set_function(lambda: objects.chats.presence.total)
        self._recorder = recorder_of(retention, config.data, self._metrics.registry)
        self._slots = slots
        if gpus := {slot.number: slot.gpu for slot in slots if slot.gpu is not None}:
            self._metrics.serve_gpus(GpuMeter.open(), gpus)
        known = KnownModels(config.data, {plan.name: plan.config for plan in plans})
        self.models = ModelHost(
            live_pool(config, plans, known, self._recorder, clock_s)
            if plans
            else single_pool(config.workers, clock_s),
            slots,
            self._metrics,
            wait_s=config.cold_wait_s if plans else None,
            readers=readers,
            known=known if plans else None,
            pipelines=pipelines_of(plans),
            changed=self._say_heartbeat,
            unix_s=lambda: now_ms() / 1000,
            pace=pace,
        )
        if plans:
            self._recorder.learner = self.models.learn
        self._runs = Runs(
            ledger,
            config.max_streams,
            self.models,
            self._metrics,
            paused_s=retention.retention_s,
            most_wait_s=config.overload_wait_s,
            idle_s=config.idle_stream_s,
            recorder=self._recorder,
            now_ms=clock,
        )
        self.service = Service(
            ledger=ledger,
            objects=objects,
            runs=self._runs,
            keys=TokenKeys.load(config.keys_path),
            config=config,
            retention=retention,
            now_ms=now_ms,
            admin=self._answer_operator,
            inputs={
                plan.name: plan.config.max_input_bytes
                for plan in plans
                if isinstance(plan.config, PipelineConfig) and plan.config.max_input_bytes
            },
        )
        unix_ms = unix_clock(now_ms, self._metrics.clock)
        self._admin = AdminHandler(
            ledger=ledger,
            runs=self._runs,
            metrics=self._metrics,
            config=config,
            pages=LivePages(self._runs, unix_ms),
            slots=self._slots,
            links=lambda: [link.described() for link in self._links],
            end=self.service.end,
            unix_ms=unix_ms,
            pool=self.models.live if plans else None,
        )

    async def _answer_operator(self, asked: str, request: ObjectRequest) -> ObjectResponse:
        return await self._admin.answer(asked, request)

    async def serve(
        self,
        running: Sequence[asyncio.Task[Any]],
        stop: Stop,
        socket: Path | None = None,
        *,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all parts until one of them ends, and raise its error if it failed.

        `closing` is called when serving has ended, before the parts are closed.
        """
        address, credentials = self._config.link_address, self._config.link_credentials
        try:
            server = await listen(self._link, address, credentials)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._config.link}: {os_reason(error)}",
                field="origin.link",
                hint="another origin may be running: stop it, or choose another port",
            ) from error
        loop = asyncio.get_running_loop()
        inner = await loop.create_unix_server(self._inner_link, socket) if socket else None
        if address.scheme != UNIX:
            address = address._replace(port=server.sockets[0].getsockname()[1])
        log.info("origin.listening", link=str(address), data=str(self._config.data))
        try:
            shown = self._config.metrics_address
            with exposed(self._metrics.registry, shown, "origin.metrics") as served:
                if served is not None:
                    log.info("origin.metrics", port=served)
                for slot in self._slots:
                    slot.belong_to(self._runs)
                self.models.start()
                await first_of(
                    *running,
                    self._until(stop),
                    self._beat(),
                    self._adopt(),
                    self._sweep(),
                    self._objects.run(),
                    self._recorder.run(),
                    self._failed,
                )
        finally:
            closing()
            self.models.close()
            server.close()
            if inner is not None:
                inner.close()
            for link in list(self._links):
                link.close()
            with suppress(TailraceError):
                await self._runs.store_deliveries()
            if self._metrics.traces is not None:
                await asyncio.to_thread(self._metrics.traces.close)

    def _link(self) -> EdgeLink:
        secret = self._config.link_credentials.secret
        return EdgeLink(self.service, self._links, self._fail, secret)

    def _inner_link(self) -> EdgeLink:
        """Return a link for a pipeline's worker. It needs no secret: only this user can connect."""
        return EdgeLink(self.service, self._links, self._fail)

    def _fail(self, error: LedgerFailed) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _until(self, stop: Stop) -> None:
        """Wait for `stop`, and then until all streams have ended, at most for `drain_s` seconds."""
        await stop.asked.wait()
        drain_s = self._config.drain_s
        if drain_s and self._runs.table.count:
            log.info("origin.draining", streams=self._runs.table.count, drain_s=drain_s)
            self.models.leaving = True
            self._say_heartbeat()
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await first_of(stop.at_once.wait(), self._none_under_way())

    async def _none_under_way(self) -> None:
        while self._runs.table.count:  # noqa: ASYNC110  (streams end in many ways)
            await asyncio.sleep(LOOK_S)

    def _say_heartbeat(self) -> None:
        heartbeat = encode(self.service.heartbeat())
        for link in self._links:
            link.send(heartbeat)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._retention.heartbeat_s)
            self._say_heartbeat()
            now = asyncio.get_running_loop().time()
            for link in list(self._links):
                link.look(now)

    async def _adopt(self) -> None:
        """Continue streams of the previous process and of dead origins that share the ledger."""
        while True:
            # In separate blocks, so that a ledger that cannot be read stops only one of the tasks.
            with self._unless_unread():
                if not self.models.leaving:
                    await self._runs.restore(await self._ledger.unfinished())
            with self._unless_unread():
                await self._runs.report_readers()
            with self._unless_unread():
                await self._runs.spending.refresh()
            with self._unless_unread():
                await self._runs.measure_load(free_memory())
            await asyncio.sleep(ADOPT_S)

    async def _sweep(self) -> None:
        """Every `sweep_s`, remove expired streams, and store the clock and new compiled kernels."""
        kernels = await asyncio.to_thread(KernelCache, self._config.data)
        while True:
            await asyncio.sleep(self._retention.sweep_s)
            self._clock.keep()
            with suppress(OSError):  # kernels that are not stored will be compiled again
                await asyncio.to_thread(kernels.keep)
            with self._unless_unread():
                await self._ledger.expire()

    @contextmanager
    def _unless_unread(self) -> Iterator[None]:
        """Log, instead of raising it, an error that says that the ledger is unreadable or damaged.

        The caller runs the `with` block again at its next interval. The error of a failed write
        (LedgerFailed) is raised, and ends the origin.
        """
        try:
            yield
        except LedgerFailed:
            raise
        except Unavailable as error:
            log.warning("ledger.away", error=str(error))
        except Damaged as error:
            if str(error) != self._told_damage:  # not logged again at every attempt
                self._told_damage = str(error)
                log.error("ledger.damaged", error=str(error))


def free_memory(meminfo: Path = MEMINFO, group: Path = GROUP) -> float:
    """Return the free share of memory, from 0 to 1.

    It is the smaller of the machine's and the control group's share, or 1.0 if neither is known.
    """
    shares = [1.0]
    with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        fields = _numbers(meminfo)
        shares.append(fields["MemAvailable:"] / fields["MemTotal:"])
    with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        # If there is no limit, the text is "max", so this raises ValueError.
        limit = int((group / "memory.max").read_text("ascii"))
        used = int((group / "memory.current").read_text("ascii"))
        # Inactive file pages count as free, because the kernel reclaims them when needed.
        used -= _numbers(group / "memory.stat")["inactive_file"]
        shares.append(1 - used / limit)
    return max(0.0, min(shares))


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file of /proc or /sys with a name and a number per line; return number by name."""
    lines = (line.split() for line in path.read_text("ascii").splitlines())
    return {name: int(value) for name, value, *_ in lines}
