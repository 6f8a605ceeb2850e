"""The producer of a pipeline: it runs the stages of each request.

If it runs a request again, it yields the same outputs: stages are deterministic, or their outputs
are in a log in the ledger (`logged_stage`), and the outputs of models are streams in the ledger. So
clients notice only a pause if the worker of the pipeline, or of one of its models, is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from tailrace.ledger.errors import CallerError
from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.config import PipelineConfig
from tailrace.origin.generations.stream_log import skipped_stage
from tailrace.origin.pipelines.inner_stream import AskingStage, caller_of
from tailrace.origin.pipelines.logged_stage import LoggedStage
from tailrace.origin.pipelines.order_pipe import StageProcessLost
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
from tailrace.origin.pipelines.table import (
    PipelineTable,
    StageTable,
    stage_class,
    stage_options,
)
from tailrace.origin.producer import About, End, Output, Remark, Request, Resumption, TimedStage

MAX_RUNS = 5
"""Maximum number of times that a worker runs the stages of a stream if their processes end early.
"""


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
        stage: AnyStage
        limit_s = table.limit_s
        if self.pool is None:
            stage = self.kind(self.options, context)
        else:
            stage = RemoteStage(self.kind, self.options, context, self.pool, limit_s)
            limit_s = None
        if not self.kind.is_deterministic:
            stage = LoggedStage(stage)
        return RunningStage(table.named, stage, table.optional, limit_s, timed)


class PipelineProducer:
    """Runs the stages of a pipeline; `origin` is the client that reads streams of models."""

    def __init__(self, name: str, table: PipelineTable, origin: OriginClient) -> None:
        """Load the classes of the stages.

        Raises:
            ConfigError: A stage or an option is not valid.
        """
        self._origin = origin
        self._table = table
        self._stages: list[_PlannedStage] = []
        for number, each in enumerate(table.stages, 1):
            field = f"pipelines.{name}.stages[{number}]"
            kind = stage_class(each.stage, field)
            pool = ProcessPool(each.processes) if kind.kind is StageKind.CPU else None
            planned = _PlannedStage(each, kind, stage_options(each, kind, field), pool)
            self._stages.append(planned)
        identity = hashlib.sha256(table.model_dump_json().encode()).hexdigest()[:32]
        fingerprint = f"pipeline {tailrace_version()} {identity}"
        self.about = About(name, fingerprint, Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of the last stage.

        If the process of a stage is lost, all stages run again, and the outputs that were given
        before are skipped: deterministic stages give the same ones.
        """
        given, skipped = 0, dict(request.skipped)
        for nth in range(1, MAX_RUNS + 1):
            count = 0
            try:
                async with aclosing(self._run(request, skipped)) as items:
                    async for item in items:
                        count += 1
                        if count <= given:
                            continue
                        if isinstance(item, Remark):
                            skipped |= dict(filter(None, [skipped_stage(item.code, item.message)]))
                        given = count
                        yield item
                return
            except StageProcessLost:
                if nth == MAX_RUNS:
                    raise

    async def _run(
        self, request: Request, skipped: Mapping[str, int]
    ) -> AsyncGenerator[Output, None]:
        recipe = request.recipe
        planned = [one for one in self._stages if one.table.named not in recipe.skipped_stages]
        request.stages[:] = [TimedStage(each.table.named) for each in planned]
        running = [
            each.running(
                StageContext(each.table.named, request.stream, recipe, self._origin), timed
            )
            for each, timed in zip(planned, request.stages, strict=True)
        ]
        prompt = Prompt(recipe.prompt, recipe.messages)
        data = None if self._table.input is None else self._input(request)
        async with aclosing(outputs(running, prompt, skipped, request.fate, data)) as items:
            async for item in items:
                yield _counted(item, running) if isinstance(item, End) else item

    async def _input(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a stream's input, from its beginning on.

        Raises:
            CallerError: The client has sent nothing for too long.
        """
        wait_s = self._table.input_wait_s
        caller = caller_of(request.recipe.tenant)
        async with aclosing(self._origin.read_input(request.stream, caller)) as pieces:
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


def open_pipeline(config: PipelineConfig) -> PipelineProducer:
    """Return the producer of the pipeline that the settings of a worker name.

    Raises:
        ConfigError: A stage or an option is not valid.
    """
    assert config.socket is not None
    table = PipelineTable.model_validate(config.pipeline)
    return PipelineProducer(config.served_name, table, OriginClient(config.socket))


def _counted(end: End, stages: list[RunningStage]) -> End:
    """Return the end of a pipeline with the tokens of all of its models."""
    asking = [each.stage for each in stages if isinstance(each.stage, AskingStage)]
    ends = [one for stage in asking for one in stage.ends]
    return replace(
        end,
        total_tokens=sum(one.total_tokens for one in ends),
        prompt_tokens=sum(one.prompt_tokens for one in ends),
    )
