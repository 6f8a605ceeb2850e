"""Promised times to the first token: what counts, what is missed, and where it is shown."""

from __future__ import annotations

import pytest

from tailrace.ledger.frame import FinishReason
from tailrace.origin.config import OriginConfig
from tailrace.origin.metrics import Metrics
from tailrace.origin.slo import SloCount, SloCounts
from tests.origin.stage import RECIPE, A, B, Stage

KEY = ("interactive", "demo")


@pytest.fixture
def slo() -> SloCounts:
    return SloCounts({"interactive": 0.3, "standard": 1.0})


def test_a_first_token_in_time_keeps_the_promise_and_a_later_one_misses_it(slo: SloCounts) -> None:
    slo.first_token(*KEY, 0.3)
    slo.first_token(*KEY, 0.301)
    slo.first_token("standard", "demo", 0.9)
    assert slo.counts == {KEY: SloCount(2, 1), ("standard", "demo"): SloCount(1, 0)}


def test_a_class_without_a_promise_does_not_count(slo: SloCounts) -> None:
    slo.first_token("batch", "demo", 100.0)
    slo.ended("batch", "demo", 100.0, FinishReason.FAILED)
    assert slo.counts == {}


@pytest.mark.parametrize(
    ("reason", "waited_s", "count"),
    [
        (FinishReason.FAILED, 0.1, SloCount(1, 1)),
        (FinishReason.ORIGIN_LOST, 0.1, SloCount(1, 1)),
        (FinishReason.STOP, 0.1, SloCount(1, 0)),
        (FinishReason.STOP, 0.4, SloCount(1, 1)),
        (FinishReason.CANCELLED, 0.1, None),
        (FinishReason.CANCELLED, 0.4, SloCount(1, 1)),
    ],
)
def test_a_stream_that_ends_without_a_token(
    slo: SloCounts, reason: FinishReason, waited_s: float, count: SloCount | None
) -> None:
    slo.ended(*KEY, waited_s, reason)
    assert slo.counts.get(KEY) == count


def test_the_settings_give_a_promise_in_seconds_and_zero_gives_none() -> None:
    assert OriginConfig().slo_s == {"interactive": 0.3, "standard": 1.0}
    assert OriginConfig(slo_interactive_ms=0, slo_batch_ms=60_000).slo_s == {
        "standard": 1.0,
        "batch": 60.0,
    }


@pytest.mark.anyio
async def test_streams_are_counted_by_class_and_model(stage: Stage) -> None:
    stage.metrics.slo.promised_s["standard"] = 1.0
    one, run = await stage.running(A)
    stage.clock_s += 0.5
    await stage.step(one, run, 0, "a")
    stage.clock_s += 10.0  # later gaps are not promised
    await stage.step(one, run, 1, "b")
    await stage.step(one, run, 2, None)
    await stage.start(B, RECIPE)
    run, _ = one.last
    stage.clock_s += 1.5
    await stage.step(one, run, 0, "a")
    await stage.step(one, run, 1, None)
    value = stage.metrics.registry.get_sample_value
    labels = {"priority": "standard", "model": "demo"}
    assert value("tailrace_slo_streams_total", labels) == 2
    assert value("tailrace_slo_missed_total", labels) == 1
    assert value("tailrace_slo_seconds", {"priority": "standard"}) == 1.0


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_at_once_does_not_count(stage: Stage) -> None:
    stage.metrics.slo.promised_s["standard"] = 1.0
    await stage.start(A)
    await stage.runs.cancel(A)
    assert stage.metrics.slo.counts == {}


def test_an_origin_without_promises_exports_none() -> None:
    metrics = Metrics()
    metrics.first_release("interactive", "demo", 5.0)
    assert metrics.registry.get_sample_value("tailrace_slo_streams_total", {}) is None
    assert metrics.slo.counts == {}
