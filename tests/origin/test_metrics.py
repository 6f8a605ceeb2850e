"""An origin's metrics: from workers' reports, from releases, and over HTTP."""

from __future__ import annotations

import socket
from dataclasses import replace

import httpx
import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode
from tailrace.ledger.telemetry.exposition import exposed
from tailrace.origin.metrics import Metrics
from tailrace.origin.workers.worker_frame import Emission, Load, StageTime, StageTimes, Step
from tests.origin.stage import RECIPE, A, B, Stage

pytestmark = pytest.mark.anyio

LOAD = Load(
    waiting=(1, 2, 3),
    running=(4, 5, 6),
    batch_limit=128,
    row_limit=96,
    turn_limit=48,
    pages=100,
    pages_free=40,
    step_us=2500,
    tokens=1000,
    prompt_tokens=200,
    reused_tokens=64,
    preemptions=1,
    drafted=30,
    accepted=20,
)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"tailrace_{name}", labels)


def test_a_workers_report_is_shown_by_class() -> None:
    metrics = Metrics()
    metrics.worker_load(1, LOAD)
    assert value(metrics, "num_requests_running", worker="1", priority="interactive") == 4
    assert value(metrics, "num_requests_waiting", worker="1", priority="batch") == 3
    assert value(metrics, "batch_limit_tokens", worker="1") == 128
    assert value(metrics, "row_limit_rows", worker="1") == 96
    assert value(metrics, "turn_limit_rows", worker="1") == 48
    assert value(metrics, "kv_cache_pages", worker="1") == 100
    assert value(metrics, "kv_cache_pages_free", worker="1") == 40
    assert value(metrics, "step_seconds", worker="1") == 0.0025


def test_counts_go_on_through_the_lives_of_a_worker() -> None:
    metrics = Metrics()
    metrics.worker_load(0, LOAD)
    metrics.worker_load(0, replace(LOAD, tokens=1500))
    metrics.worker_lost(0)
    metrics.worker_load(0, replace(LOAD, tokens=10))
    assert value(metrics, "generation_tokens_total", worker="0") == 1510
    assert value(metrics, "prefix_cache_hit_tokens_total", worker="0") == 128
    assert value(metrics, "worker_deaths_total", kind="exited") == 1


def test_a_lost_worker_is_not_busy() -> None:
    metrics = Metrics()
    metrics.worker_load(0, LOAD)
    metrics.worker_lost(0)
    assert value(metrics, "num_requests_running", worker="0", priority="batch") == 0
    assert value(metrics, "kv_cache_pages", worker="0") == 0


async def test_latencies_are_those_of_releases(stage: Stage) -> None:
    slot = stage.slots[0]
    await stage.ready(slot)
    await stage.start(A, RECIPE.model_copy(update={"priority": "interactive"}))
    for index, clock_s in enumerate((0.25, 0.5, 1.5)):
        stage.clock_s = clock_s
        await stage.step(slot, slot.last[0], index, "a")
    name, kind = "time_to_first_token_seconds", "inter_token_latency_seconds"
    metrics = stage.metrics
    assert value(metrics, f"{name}_sum", priority="interactive") == 0.25
    assert value(metrics, f"{name}_count", priority="interactive") == 1
    assert value(metrics, f"{kind}_sum", priority="interactive") == 1.25
    assert value(metrics, f"{kind}_count", priority="interactive") == 2
    assert value(metrics, f"{name}_count", priority="batch") == 0


def test_a_latency_is_in_every_bucket_from_its_own_on() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.0011, 60.0):
        metrics.release("batch", seconds)
    name = "inter_token_latency_seconds_bucket"
    for bound, count in (("0.001", 1), ("0.0025", 2), ("5.0", 2), ("+Inf", 3)):
        assert value(metrics, name, priority="batch", le=bound) == count


async def test_streams_are_counted_by_how_they_end(stage: Stage) -> None:
    two = stage.slots[1]
    one, _ = await stage.running(A)
    await stage.start(B)
    assert value(stage.metrics, "num_streams") == 2
    await stage.step(one, one.sent[0][0], 0, "a")
    await stage.step(one, one.sent[0][0], 1, None)
    await stage.step(one, one.sent[1][0], 0, "b")
    await stage.lost(one)
    await stage.ready(two)
    await stage.runs.cancel(B)
    await stage.cancelled(two, two.last[0], 1)
    counts = {
        reason: value(stage.metrics, "streams_ended_total", finish_reason=reason.word)
        for reason in FinishReason
    }
    ended = {FinishReason.LENGTH: 1, FinishReason.CANCELLED: 1}
    assert counts == {reason: ended.get(reason, 0) for reason in FinishReason}
    assert value(stage.metrics, "takeovers_total") == 1
    assert value(stage.metrics, "num_streams") == 0


async def test_a_step_that_is_refused_measures_nothing(stage: Stage) -> None:
    one, _ = await stage.running(A)
    run = one.last[0]
    await stage.ledger.take_over(A)
    emissions = (
        Emission(run, 0, (1,), (), encode(Token("a", 0))),
        Emission(run, 1, (), (), encode(StreamEnd(1, FinishReason.STOP, 1, 2))),
    )
    await stage.runs.worker_step(one, Step.of(emissions).cut())
    assert value(stage.metrics, "streams_ended_total", finish_reason="stop") == 0
    name = "time_to_first_token_seconds_count"
    assert value(stage.metrics, name, priority="standard") == 0


async def test_they_are_served_over_http_until_the_origin_stops() -> None:
    metrics = Metrics()
    metrics.worker_load(0, LOAD)
    with exposed(metrics.registry, ("127.0.0.1", 0), "origin.metrics") as port:
        url = f"http://127.0.0.1:{port}/metrics"
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.get(url)
            assert answer.status_code == 200
            assert 'tailrace_generation_tokens_total{worker="0"} 1000.0' in answer.text
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        with (
            pytest.raises(ConfigError) as error,
            exposed(Metrics().registry, address, "origin.metrics"),
        ):
            pass
    assert error.value.field == "origin.metrics"


def test_nothing_is_served_unless_asked_for() -> None:
    with exposed(Metrics().registry, None, "origin.metrics") as port:
        assert port is None


async def test_the_times_of_a_pipelines_stages_are_counted(stage: Stage) -> None:
    one, _ = stage.slots
    await stage.ready(one)
    await stage.start(A, RECIPE)
    times = (StageTime("model", 3, 250_000), StageTime("blocklist", 5, 2_000))
    stage.runs.worker_stages(one, StageTimes(A, times))
    stage.runs.worker_stages(one, StageTimes(B, times))  # a stream that is not known any more
    for time in times:
        labels = {"model": one.model, "stage": time.stage}
        assert value(stage.metrics, "stage_seconds_count", **labels) == 2
        assert value(stage.metrics, "stage_seconds_sum", **labels) == 2 * time.busy_us / 1e6
    stream = stage.runs.core.table.by_id[A]
    assert stream.progress.stages == times
    so_far: tuple[StageTime, ...] = (StageTime("model", 1, 9_000),)
    stage.runs.worker_stages(one, StageTimes(A, so_far, is_final=False))
    labels = {"model": one.model, "stage": "model"}
    assert value(stage.metrics, "stage_seconds_count", **labels) == 2
    assert [*stream.progress.stages] == [*so_far]
