"""`tailrace origin`: starts the workers, and then the supervisor.

Workers start first because they take longest: importing torch alone takes two seconds. So this
module imports little, and the supervisor's modules are imported while the workers import theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from tailrace.ledger.errors import EXIT_FAILED, EXIT_USAGE, CallerError, ConfigError
from tailrace.ledger.process.lifecycle import Stop, end_without_threads, look_less_often
from tailrace.ledger.process.logging_setup import configure_logging
from tailrace.ledger.process.tasks import background
from tailrace.origin.checkpoint.folder import check_folder
from tailrace.origin.config import LedgerConfig, OriginConfig, PipelineConfig, StreamsConfig
from tailrace.origin.gpu.placement import place
from tailrace.origin.pool.model_table import Tables
from tailrace.origin.workers.fork_client import ForkServer
from tailrace.origin.workers.kernel_cache import offer
from tailrace.origin.workers.liveness import SilenceLimits
from tailrace.origin.workers.program import gpus_of, makes_tokens, program, unused
from tailrace.origin.workers.socket_folder import remove_left_folders, socket_folder
from tailrace.origin.workers.worker_process import WorkerSlot, worker_environment

if TYPE_CHECKING:
    from tailrace.origin.serving.plan import ModelPlan

log = structlog.get_logger("origin")


def run(
    config: OriginConfig,
    ledger: LedgerConfig,
    streams: StreamsConfig,
    tables: Tables | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, and then for at most `drain_s`.

    Afterwards the process ends even if a library has left a thread running. If `tables` has
    models, they are served instead of the one of `config`.

    Raises:
        TailraceError: The origin cannot start or continue.
    """
    configure_logging(config.log_level)
    # At a lower level, httpx would log each request of a webhook with its URL.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _check_folders(config, tables or {})
    offer(config.data)
    remove_left_folders()
    several: list[ModelPlan] = []
    if tables:
        # Imported here, because an origin with a single model does not need this module.
        from tailrace.origin.serving.plan import planned

        several = planned(tables, config)
    for name in unused(*[plan.config for plan in several] or [config]):
        log.warning(
            "setting.unused", setting=f"origin.{name}", why="it has no effect on the served models"
        )
    status = EXIT_FAILED
    try:
        with _socket_for(several) as socket:
            uvloop.run(_start(config, ledger, streams, several, socket))
        status = 0
    except (CallerError, ConfigError):
        status = EXIT_USAGE
        raise
    finally:
        if left := end_without_threads(status):
            log.warning("threads.left", threads=left)


@contextmanager
def _socket_for(plans: list[ModelPlan]) -> Iterator[Path | None]:
    """Yield the path for a Unix socket at which workers of pipelines reach this origin.

    The path is added to the settings of the pipelines in `plans`. It is None without pipelines.
    """
    if not any(isinstance(plan.config, PipelineConfig) for plan in plans):
        yield None
        return
    with socket_folder() as folder:
        path = folder / "streams.sock"
        for at, plan in enumerate(plans):
            if isinstance(plan.config, PipelineConfig):
                config = plan.config.model_copy(update={"socket": path})
                plans[at] = replace(plan, config=config)
        yield path


def _check_folders(config: OriginConfig, tables: Tables) -> None:
    """Raise ConfigError for a missing model folder, or a data folder that cannot be written."""
    named = [(f"models.{name}", table.alone(name, config)) for name, table in tables.items()]
    for field, model in named or [("origin.model", config)]:
        if makes_tokens(model):
            check_folder(model.model, field)
    data = config.data
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{data} cannot be created: {error.strerror}",
            field="origin.data",
            hint="use a folder that this user may write to: --data FOLDER",
        ) from error
    if not os.access(data, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{data} cannot be written to",
            field="origin.data",
            hint=f"use a folder that user {os.geteuid()} may write to: --data FOLDER",
        )


async def _start(
    config: OriginConfig,
    ledger: LedgerConfig,
    streams: StreamsConfig,
    several: Sequence[ModelPlan],
    socket: Path | None,
) -> None:
    fork_server = fork_server_of(config, [plan.config for plan in several] or [config])
    slots: list[WorkerSlot] = []
    for plan in several:
        slots += slots_of(plan.name, plan.config, fork_server, len(slots), plan.gpus)
    if not several:  # a single model is always loaded, so its workers can start now
        slots = slots_of("", config, fork_server, 0, _gpus_of_workers(config))
        for slot in slots:
            slot.launch()
    stop = Stop()
    parts = [slot.keep() for slot in slots] + ([fork_server.keep()] if fork_server else [])
    async with background(parts) as running:
        # In a thread, so that the event loop can start the workers meanwhile.
        await asyncio.to_thread(import_module, "tailrace.origin.supervisor")
        from tailrace.origin.supervisor import serve

        look_less_often()
        await serve(config, ledger, streams, slots, running, stop, several, socket)


def _gpus_of_workers(config: OriginConfig) -> Sequence[str]:
    """Return the GPU of each worker of a single model; empty if no GPUs are assigned."""
    gpus = gpus_of(config)
    if not gpus:
        return ()
    if config.workers > len(gpus) and config.kv_mib is None:
        hint = "set origin.kv_mib, or the first worker of a GPU takes most of its memory"
        log.warning("gpu.shared", workers=config.workers, gpus=gpus, hint=hint)
    return place([0.0] * config.workers, gpus, {})


def fork_server_of(config: OriginConfig, models: Sequence[OriginConfig]) -> ForkServer | None:
    """Return a fork server for the workers of all models that make tokens, or None.

    The fork server imports the modules that any of these workers needs. If there is only one model
    and it is small, the fork server loads it, too. Several models are not loaded there, because the
    fork server would keep a model in memory that the pool has unloaded.
    """
    ours = [model for model in models if makes_tokens(model)]
    if not config.fork_workers or not ours:
        return None
    devices = {model.device for model in ours}
    module, settings = program(ours[0])
    if len(models) > 1:
        settings = devices.pop() if len(devices) == 1 else "auto"
    return ForkServer(module, settings, worker_environment())


def slots_of(
    name: str,
    config: OriginConfig,
    fork_server: ForkServer | None,
    first: int,
    gpus: Sequence[str] = (),
) -> list[WorkerSlot]:
    """Return the worker slots of one model, numbered from `first` on.

    `gpus` has the GPU of each worker, or is empty if no GPUs are assigned.
    """
    command = program(config)
    limits = SilenceLimits(config.worker_silence_s, config.worker_start_s)
    forks = fork_server if makes_tokens(config) else None
    return [
        WorkerSlot(first + nth, command, limits, forks, name, gpus[nth] if gpus else None)
        for nth in range(config.workers)
    ]
