"""Traces of a real edge and a real origin, as a collector gets them by OTLP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.processes import Edge, Origin, running

pytestmark = pytest.mark.anyio

PROMPT = "The secret of the old lighthouse"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOKENS = 20


@contextmanager
def collector(spans: list[tuple[str, Span]]) -> Iterator[str]:
    """Add each exported span to `spans`, with the name of its service."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers.get("Content-Encoding") is None
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                said = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    spans.extend((said["service.name"], span) for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(span: Span, name: str) -> str | int:
    [found] = [one.value for one in span.attributes if one.key == name]
    return str(found.string_value) or int(found.int_value)


async def test_a_trace_goes_from_the_client_by_the_edge_to_the_origin(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    spans: list[tuple[str, Span]] = []
    settings = tmp_path / "tailrace.toml"
    with collector(spans) as url:
        settings.write_text(f'[origin]\ntraces = "{url}"\n[edge]\ntraces = "{url}"\n')
        origin = Origin(tmp_path / "data", config=settings)
        edge = Edge(origin, config=settings)
        async with running(origin, edge):
            asked = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
            traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "Accept": "text/event-stream"}
            for headers in (traced, {**traced, "Accept": "application/json"}):
                answer = await client.post(f"{edge.url}/v1/generate", json=asked, headers=headers)
                assert answer.status_code == 200
            dropped = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}
            await client.post(f"{edge.url}/v1/generate", json=asked, headers=traced | dropped)
    requests = [span for service, span in spans if service == "tailrace-edge"]
    streams = [span for service, span in spans if service == "tailrace-origin"]
    # One for each, none for a token, and none of what its client does not keep.
    assert [span.name for span in requests] == ["POST /v1/generate"] * 2
    assert [span.name for span in streams] == ["text_completion demo"] * 2
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    assert {span.parent_span_id.hex() for span in requests} == {PARENT}
    assert {span.parent_span_id for span in streams} == {span.span_id for span in requests}
    for span in streams:
        assert said(span, "gen_ai.usage.output_tokens") == TOKENS
        names = [event.name for event in span.events]
        assert names[:2] == ["scheduled", "frame"] and 2 <= names.count("frame") <= 6
        assert span.start_time_unix_nano <= span.events[0].time_unix_nano
        assert span.events[-1].time_unix_nano <= span.end_time_unix_nano + 2_000_000
    ids = {said(span, "tailrace.stream.id") for span in streams}
    assert ids == {said(span, "tailrace.stream.id") for span in requests}
    assert PROMPT not in str(spans)


def test_who_keeps_no_traces_does_not_load_what_makes_them() -> None:
    code = (
        "import sys, tailrace.edge.serve, tailrace.origin.supervisor;"
        " print('opentelemetry' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
