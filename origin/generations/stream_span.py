"""The trace of a stream at this origin, as one span of OpenTelemetry."""

from __future__ import annotations

import time

from tailrace.ledger.frame import FinishReason
from tailrace.ledger.telemetry.traces import TraceContext, Traces, context_of
from tailrace.origin.core.stream import Stream

NS_PER_MS = 1_000_000
NS_PER_US = 1_000


def record_span(traces: Traces, stream: Stream, reason: FinishReason, now_s: float) -> None:
    """Record the span of a stream when it ends, so that tracing adds no work to each token.

    Names follow OpenTelemetry's conventions for generative models. The span has events for some
    frames only: the first, the second, the fourth, the eighth and so on. `now_s` is the time on the
    clock of `StreamProgress`.
    """
    recipe, progress = stream.recipe, stream.progress
    life = progress.life(stream.epoch - 1, now_s)
    begun_ns = time.time_ns() - (life.whole_ms or 0) * NS_PER_MS
    operation = "chat" if recipe.messages else "text_completion"
    span = traces.begin(
        f"{operation} {recipe.model}",
        None if recipe.trace is None else TraceContext.parse(recipe.trace),
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tailrace",
            "gen_ai.request.model": recipe.model,
            "gen_ai.request.max_tokens": recipe.max_tokens,
            "gen_ai.usage.input_tokens": len(recipe.prompt_ids),
            "gen_ai.usage.output_tokens": progress.tokens,
            "tailrace.stream.id": stream.id.hex(),
            "tailrace.takeovers": life.takeovers or 0,
            "tailrace.resumes": progress.resumes,
        },
        start_ns=begun_ns,
    )
    span.set_attribute("gen_ai.response.finish_reasons", [reason.word])
    if reason in (FinishReason.FAILED, FinishReason.ORIGIN_LOST):
        span.set_attribute("error.type", reason.word)
    if life.queue_ms is not None:
        span.add_event("scheduled", timestamp=begun_ns + life.queue_ms * NS_PER_MS)
    for stage in progress.stages:
        child = traces.begin(
            f"stage {stage.stage}",
            context_of(span),
            {"tailrace.stage.items": stage.items, "tailrace.stage.busy_us": stage.busy_us},
            start_ns=begun_ns,
        )
        child.end(begun_ns + stage.busy_us * NS_PER_US)
    nth = 1
    while nth <= len(progress.frame_ms):
        index, at_ms = progress.first_timed + nth - 1, progress.frame_ms[nth - 1]
        span.add_event("frame", {"tailrace.index": index}, begun_ns + at_ms * NS_PER_MS)
        nth *= 2
    span.end()
