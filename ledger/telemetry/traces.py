"""OpenTelemetry traces, exported by OTLP over HTTP.

The OpenTelemetry SDK is imported only if a collector is configured. The SDK's environment variables
apply: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES,
OTEL_BSP_SCHEDULE_DELAY. The service that starts a trace decides if the trace is sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.version import tailrace_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

PATH = "/v1/traces"
"""Path at a collector to which traces are sent."""
EXPORT_TIMEOUT_S = 5.0

HEADER = b"traceparent"
SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attributes = Mapping[str, str | int | float | bool]


class TraceContext(NamedTuple):
    """A W3C Trace Context: the value of the header `traceparent`.

    Ids are in hex. `text` is the header's value for the next service.
    """

    trace_id: str
    span_id: str
    flags: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a header; return None if it is invalid and so must be ignored (section 3.2.2)."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        is_known = version == "00" and rest is None
        if version == "ff" or not (is_known or version > "00"):
            return None
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, int(flags, 16) & SAMPLED)

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def text(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


class Traces:
    """The spans of one process; `close` exports those that are not exported yet."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tailrace", tailrace_version())

    @classmethod
    def open(cls, collector: str | None, service: str, setting: str) -> Traces | None:
        """Start exporting to the URL `collector`; return None if `collector` is None.

        Raises:
            ConfigError: The SDK is not installed.
        """
        if collector is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces need the package {error.name}",
                field=setting,
                hint="pip install 'tailrace[telemetry]'",
            ) from None
        named = {"service.name": service, "service.version": tailrace_version()}
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        url = collector.rstrip("/") + PATH
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        *,
        serves: bool = False,
        start_ns: int | None = None,
    ) -> Span:
        """Start a span.

        With `serves` the span is that of a server that handles another service's request.
        `start_ns` is Unix time in ns, by default now.
        """
        from opentelemetry.trace import SpanKind

        kind: SpanKind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        return self._tracer.start_span(
            name, _context(parent), kind, dict(attributes), start_time=start_ns
        )

    def close(self) -> None:
        """Export the remaining spans and stop; wait up to EXPORT_TIMEOUT_S for the collector."""
        self._provider.shutdown()


def context_of(span: Span) -> TraceContext:
    """Return the trace context of a span, to send to the next service."""
    told = span.get_span_context()
    return TraceContext(f"{told.trace_id:032x}", f"{told.span_id:016x}", int(told.trace_flags))


def _context(parent: TraceContext | None) -> Context:
    from opentelemetry.context import Context as Empty
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Empty()
    span_context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags),
    )
    return set_span_in_context(NonRecordingSpan(span_context), Empty())
