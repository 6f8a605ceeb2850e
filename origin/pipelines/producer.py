"""The producer of a pipeline: it runs the stages of each request.

If it runs a request again, it yields the same outputs: stages are deterministic, or their outputs
are in a log in the ledger (`logged_stage`), and the outputs of models are streams in the ledger. So
clients notice only a pause if the worker of the pipeline, or of one of its models, is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.ledger.errors import CallerError, ConfigError, TailraceError
from tailrace.ledger.process.tasks import background
from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.config import PipelineConfig
from tailrace.origin.pipelines.inner_stream import AskingStage, caller_of
from tailrace.origin.pipelines.logged_stage import LoggedStage
from tailrace.origin.pipelines.order_pipe import StageFailed, StageLost
from tailrace.origin.pipelines.origin_client import OriginClient
from tailrace.origin.pipelines.process_pool import ProcessPool, RemoteStage
from tailrace.origin.pipelines.runner import RunningStage, outputs
from tailrace.origin.pipelines.stage import (
    AnyStage,
    Prompt,
    StageContext,
    StageKind,
    StageOptions,
)
from tailrace.origin.pipelines.stage_orders import Load
from tailrace.origin.pipelines.switches import CHANGES, MAX_CHANGES_BYTES, REQUESTS, Switches
from tailrace.origin.pipelines.table import (
    PipelineTable,
    StageTable,
    stage_class,
    stage_options,
)
from tailrace.origin.producer import About, End, Output, Request, Resumption, TimedStage

if TYPE_CHECKING:
    from tailrace.origin.producers.upstream import Progress

log = structlog.get_logger("pipeline")

MAX_RUNS = 5
"""Maximum number of times that a worker runs the stages of a stream if a stage object is lost."""


@dataclass(frozen=True, slots=True)
class _PlannedStage:
    """A stage of a pipeline: its settings, its class, its options and its processes, if any."""

    table: StageTable
    kind: type[AnyStage]
    options: StageOptions
    pool: ProcessPool | None

    def running(self, context: StageContext, timed: TimedStage) -> RunningStage:
        """Return the stage for one stream; `timed` counts its time."""
        table = self.table
        # The other process counts the time for each item, which includes no waiting.
        limit_s = table.limit_s if self.pool is None else None
        make = partial(self._object, context)
        return RunningStage(table.named, make, table.optional, limit_s, timed)

    def _object(self, context: StageContext, begin: int) -> AnyStage:
        """Return a stage object that gets the items from number `begin` on."""
        context = replace(context, begin=begin)
        stage: AnyStage
        if self.pool is None:
            stage = self.kind(self.options, context)
        else:
            stage = RemoteStage(self.kind, self.options, context, self.pool, self.table.limit_s)
        return stage if self.kind.is_deterministic else LoggedStage(stage)


class _StreamRuns:
    """The runs of the stages of one stream in this worker, and its log of their changes.

    `stages` are those of the current run, which has given `count` outputs. The runs before it have
    given `given` of them.
    """

    def __init__(self, origin: OriginClient, request: Request) -> None:
        self.stages: list[RunningStage] = []
        self.given = self.count = 0
        self._origin = origin
        self._fate = request.fate
        self._name = f"{request.stream.hex()}:{CHANGES}"
        self._caller = caller_of(request.recipe.tenant)
        self._size = 0
        self._turn = asyncio.Lock()

    async def read_changes(self) -> bytes:
        """Return the changes that are stored."""
        log = await self._origin.read_log(self._name, self._caller)
        self._size = len(log)
        return log

    async def append(self, line: bytes) -> None:
        """Store a line after those that were read or stored before."""
        async with self._turn:
            size, limit = self._size, MAX_CHANGES_BYTES
            await self._origin.append_log(self._name, self._caller, size, line, limit)
            self._size += len(line)

    async def load_logs(self, stages: Sequence[str]) -> None:
        """Read the logs of the outputs of these stages."""
        for stage in self._logged(stages):
            await stage.read_log()

    def is_new(self, stages: Sequence[str]) -> bool:
        """Return True if this run has repeated all outputs of earlier runs, and these stages' logs.

        Earlier runs may have been those of other workers.
        """
        if self._fate.is_repeating or self.count < self.given:
            return False
        return not any(stage.repeats for stage in self._logged(stages))

    def _logged(self, stages: Sequence[str]) -> list[LoggedStage]:
        return [
            one.stage
            for one in self.stages
            if one.name in stages and isinstance(one.stage, LoggedStage)
        ]


class PipelineProducer:
    """Runs the stages of a pipeline; `origin` is the client that reads streams of models."""

    def __init__(
        self, name: str, table: PipelineTable, origin: OriginClient, device: str = "auto"
    ) -> None:
        """Load the classes of the stages; those of kind `gpu` use `device`.

        Raises:
            ConfigError: A stage or an option is not valid.
        """
        self._origin = origin
        self._table = table
        self._name = name
        self._stages: list[_PlannedStage] = []
        for number, each in enumerate(table.stages, 1):
            field = f"pipelines.{name}.stages[{number}]"
            kind = stage_class(each.stage, field)
            options = stage_options(each, kind, field)
            load = Load(kind, options, device) if kind.kind is StageKind.GPU else None
            pool = None if kind.kind is StageKind.IO else ProcessPool(each.processes, load)
            self._stages.append(_PlannedStage(each, kind, options, pool))
        said = table.model_dump_json(exclude={"memory_mib"})
        identity = hashlib.sha256(said.encode()).hexdigest()[:32]
        fingerprint = f"pipeline {tailrace_version()} {identity}"
        self.about = About(name, fingerprint, Resumption.REPEATS)

    async def load(self, progress: Progress) -> None:
        """Load what the stages of kind `gpu` need, and report each of them.

        Raises:
            ConfigError: A stage cannot load it.
        """
        stages = [each for each in self._stages if each.kind.kind is StageKind.GPU]
        for number, each in enumerate(stages):
            name = each.table.named
            progress(f"loading the stage {name}", number, len(stages))
            assert each.pool is not None
            try:
                device = await each.pool.load()
            except (StageFailed, StageLost) as error:
                message = f"the stage {name} of {self._name} cannot load: {error.message}"
                raise ConfigError(message, field=f"pipelines.{self._name}") from error
            self.about = replace(self.about, device=device)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of the last stage.

        If a stage object is lost, all stages run again, and the outputs that were given before are
        skipped: deterministic stages give the same ones.
        """
        runs = _StreamRuns(self._origin, request)
        names = [each.table.named for each in self._stages]
        switches = Switches(names, request.recipe.skipped_stages, runs)
        works: list[Coroutine[Any, Any, None]] = []
        if any(each.table.optional for each in self._stages):
            switches.add_changes(await runs.read_changes())
            works.append(await self._requests(request, switches))
        async with background(works):
            for nth in range(1, MAX_RUNS + 1):
                runs.stages, runs.count = self._running(request), 0
                switches.begin_run()
                try:
                    async with aclosing(self._run(request, runs.stages, switches)) as items:
                        async for item in items:
                            runs.count += 1
                            if runs.count > runs.given:
                                runs.given = runs.count
                                yield item
                    return
                except StageLost:
                    if nth == MAX_RUNS:
                        raise

    def _running(self, request: Request) -> list[RunningStage]:
        """Return the stages for one run of a stream."""
        request.stages[:] = [TimedStage(each.table.named) for each in self._stages]
        return [
            each.running(
                StageContext(each.table.named, request.stream, request.recipe, self._origin), timed
            )
            for each, timed in zip(self._stages, request.stages, strict=True)
        ]

    async def _run(
        self, request: Request, running: list[RunningStage], switches: Switches
    ) -> AsyncGenerator[Output, None]:
        prompt = Prompt(request.recipe.prompt, request.recipe.messages)
        data = None if self._table.input is None else self._input(request)
        async with aclosing(outputs(running, prompt, switches, request.fate, data)) as items:
            async for item in items:
                yield _counted(item, running) if isinstance(item, End) else item

    async def _requests(self, request: Request, switches: Switches) -> Coroutine[Any, Any, None]:
        """Add the stored requests to switch stages; return the work to add all that follow."""
        name, caller = f"{request.stream.hex()}:{REQUESTS}", caller_of(request.recipe.tenant)
        stored = await self._origin.read_log(name, caller)
        for line in stored.splitlines():
            switches.add_request(line)

        async def follow() -> None:
            rest, known = b"", len(stored)
            try:
                async with aclosing(self._origin.follow_log(name, caller)) as pieces:
                    async for piece in pieces:
                        *lines, rest = (rest + piece[known:]).split(b"\n")
                        known = max(0, known - len(piece))
                        for line in lines:
                            switches.add_request(line)
            except TailraceError as error:
                log.warning("stage.requests_lost", stream=request.stream.hex(), error=str(error))

        return follow()

    async def _input(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a stream's input, from its beginning on.

        Raises:
            CallerError: The client has sent nothing for too long.
        """
        wait_s = self._table.input_wait_s
        caller = caller_of(request.recipe.tenant)
        async with aclosing(self._origin.follow_log(request.stream.hex(), caller)) as pieces:
            while True:
                try:
                    async with asyncio.timeout(wait_s):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise CallerError(
                        f"no input has come for {wait_s:g} s",
                        code="input_timeout",
                        hint="send input more often, or complete it",
                    ) from None
                yield piece

    async def close(self) -> None:
        """Close the connection to the origin, and end the processes of stages."""
        await self._origin.close()
        for each in self._stages:
            if each.pool is not None:
                await each.pool.close()


async def open_pipeline(config: PipelineConfig, progress: Progress) -> PipelineProducer:
    """Return the producer of the pipeline that the settings of a worker name, ready for requests.

    Raises:
        ConfigError: A stage or an option is not valid, or a stage cannot load what it needs.
    """
    assert config.socket is not None
    table = PipelineTable.model_validate(config.pipeline)
    origin = OriginClient(config.socket)
    producer = PipelineProducer(config.served_name, table, origin, config.device)
    try:
        await producer.load(progress)
    except BaseException:
        await producer.close()
        raise
    return producer


def _counted(end: End, stages: list[RunningStage]) -> End:
    """Return the end of a pipeline with the tokens of all of its models."""
    made = [stage for each in stages for stage in each.made]
    ends = [end for stage in made if isinstance(stage, AskingStage) for end in stage.ends]
    return replace(
        end,
        total_tokens=sum(one.total_tokens for one in ends),
        prompt_tokens=sum(one.prompt_tokens for one in ends),
    )
