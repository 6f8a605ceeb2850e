"""The producer of a pipeline: it runs the stages of each request.

It repeats its outputs: the same request gives the same ones, because stages are deterministic and
the outputs of models are streams in the ledger. So a killed worker, or a killed model, costs a
pause.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.config import PipelineConfig
from tailrace.origin.pipelines.origin_client import OriginClient
from tailrace.origin.pipelines.runner import RunningStage, outputs
from tailrace.origin.pipelines.stage import Prompt, StageContext
from tailrace.origin.pipelines.stages.model import ModelStage
from tailrace.origin.pipelines.table import PipelineTable, stage_class, stage_options
from tailrace.origin.producer import About, End, Output, Request, Resumption


class PipelineProducer:
    """Runs the stages of a pipeline; `origin` reads the streams of its models."""

    def __init__(self, name: str, table: PipelineTable, origin: OriginClient) -> None:
        """Load the classes of the stages.

        Raises:
            ConfigError: A stage or an option is not valid.
        """
        self._origin = origin
        self._stages = []
        for number, each in enumerate(table.stages, 1):
            field = f"pipelines.{name}.stages[{number}]"
            kind = stage_class(each.stage, field)
            self._stages.append((each, kind, stage_options(each, kind, field)))
        identity = hashlib.sha256(table.model_dump_json().encode()).hexdigest()[:32]
        fingerprint = f"pipeline {tailrace_version()} {identity}"
        self.about = About(name, fingerprint, Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of the last stage."""
        recipe = request.recipe
        running = [
            RunningStage(
                each.named,
                kind(options, StageContext(each.named, request.stream, recipe, self._origin)),
                each.optional,
                each.limit_s,
            )
            for each, kind, options in self._stages
        ]
        prompt = Prompt(recipe.prompt, recipe.messages)
        async with aclosing(outputs(running, prompt, dict(request.skipped))) as items:
            async for item in items:
                yield _counted(item, running) if isinstance(item, End) else item

    async def close(self) -> None:
        """Close the connection to the origin."""
        await self._origin.close()


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
    models = [each.stage for each in stages if isinstance(each.stage, ModelStage)]
    ends = [one.counted for one in models if one.counted is not None]
    return replace(
        end,
        total_tokens=sum(one.total_tokens for one in ends),
        prompt_tokens=sum(one.prompt_tokens for one in ends),
    )
