"""`/openapi.json` and `/llms.txt`: valid, whole, and true of a real edge."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.applications import Starlette
from starlette.routing import Match, Route

from tailrace.edge import sse
from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.keys import KeyRing
from tailrace.edge.access.page_origins import EXPOSED_HEADERS
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig, access_rules
from tailrace.edge.openai.chat import ChatBody
from tailrace.edge.openapi.document import HEADERS, LLMS_FILE, openapi_document
from tailrace.edge.openapi.errors import CODES
from tailrace.edge.openapi.operations import EVENT_SCHEMA, OPERATIONS, Operation
from tailrace.edge.openapi.schemas import ORIGIN_BODIES, event_name
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import FRAMES, Logged, StreamError
from tests import origin_bodies
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import TIMEOUT
from tests.frame_strategies import frames_of
from tests.runtimes.cases import TABLE, filled

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
DOCUMENT = openapi_document()
METHODS = ("get", "head", "post", "put", "delete", "options", "patch")
LOGGED_FRAMES = [cls for cls in FRAMES.values() if issubclass(cls, Logged)]
ID = "0" * 32
WIDE = {"/v1/stream/{name}": "name", "/v1/models/{name}": "name", "/web/{path}": "path"}
"""Paths with a parameter that takes the rest of the path, slashes too."""
WIDE_OF_STREAMS = "/v1/stream/__ds/subscriptions/{id}/streams/{name}"
VALUES: dict[str, str | int] = {
    "ended": ID,
    "text": "text",
    "last": 8,
    "beyond": 9,
    "schema": "0" * 16,
    "taken_key": "k",
    "token": "v1.k.p.m",
    "other_token": "v1.k.p.n",
    **{f"{kind}_token": f"v1.{kind}" for kind in "forged unknown_key version cut".split()},
    **{f"{kind}_token": f"v1.{kind}" for kind in "expired reading cancelling".split()},
}
CASES: list[dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))["cases"]


def faults(schema: Mapping[str, Any], value: object) -> list[str]:
    """Return why a value does not fit a schema of the document."""
    validator = Draft202012Validator({"components": DOCUMENT["components"], **schema})
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(value)]


def resolved(thing: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reference names, or the thing itself."""
    while "$ref" in thing:
        found: Any = DOCUMENT
        for step in thing["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        thing = found
    return dict(thing)


def pattern_of(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    wide = WIDE.get(template) or ("name" if template == WIDE_OF_STREAMS else None)
    made = [
        re.escape(part) if at % 2 == 0 else (".+" if part == wide else "[^/]+")
        for at, part in enumerate(parts)
    ]
    below = "(?:/.*)?" if template.startswith("/v1/objects/") else ""
    return re.compile("".join(made) + below, re.DOTALL)


PATTERNS = [
    (pattern_of(path), path)
    for path in sorted(DOCUMENT["paths"], key=lambda path: (path.count("{"), -len(path)))
]


def item_of(path: str) -> dict[str, Any] | None:
    """Return the path item that describes a request's path."""
    plain = unquote(path.partition("?")[0])
    return next((DOCUMENT["paths"][name] for one, name in PATTERNS if one.fullmatch(plain)), None)


def concrete(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", path)


# ---- the document by itself ----


def test_the_document_is_openapi_3_1() -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_every_operation_is_described_and_has_a_tag() -> None:
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            place = f"{method} {path}"
            assert method in METHODS, place
            assert operation["summary"] and operation["description"], place
            assert set(operation["tags"]) <= tags, place
            for parameter in operation.get("parameters", ()):
                assert parameter["description"], place


def app_of(rules: Any = None) -> Starlette:
    link: Any = None  # no request reaches it
    return create_app(link, EdgeConfig(http=("127.0.0.1:0",)), rules)


def test_every_route_is_described_and_every_description_is_of_a_route() -> None:
    routes = [route for route in app_of().routes if isinstance(route, Route)]
    served = {(route.path, method) for route in routes for method in route.methods or ()}
    described = set()
    for path, item in DOCUMENT["paths"].items():
        for method in item:
            scope = {"type": "http", "method": method.upper(), "path": concrete(path)}
            found = [one for one in routes if one.matches(scope)[0] is Match.FULL]
            assert found, f"no route is for {method} {path}"
            described.add((found[0].path, method.upper()))
    assert described == served


def test_the_error_codes_are_those_of_the_protocol() -> None:
    text = (ROOT / "PROTOCOL.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| (?:yes|no) \|", text, re.MULTILINE)
    told = {(code, status) for status, codes in CODES.items() for code in codes.split()}
    assert {(code, int(status)) for code, status in table} - told == set()
    # These errors are not in the table, but described where they are made.
    others = {("request_timeout", 408), ("gone", 410)}
    assert told - {(code, int(status)) for code, status in table} == others


def test_the_headers_of_answers_can_be_read_by_pages() -> None:
    exposed = {name.lower() for name in EXPOSED_HEADERS.split(", ")}
    # The frames view is for edges, and the rest for clients that are no pages of another origin.
    others = {"tailrace-opened", "x-vercel-ai-ui-message-stream", "www-authenticate", "allow"}
    assert {name.lower() for name in HEADERS} - others <= exposed


@given(st.data())
def test_every_event_fits_its_schema(data: st.DataObject) -> None:
    for cls in LOGGED_FRAMES:
        [event] = events_of(sse.event(data.draw(frames_of(cls))).decode())
        for name in (event_name(cls.__name__), "GenerateEvent"):
            assert faults({"$ref": f"#/components/schemas/{name}"}, event) == []
    [event] = events_of(sse.event(data.draw(frames_of(StreamError))).decode())
    assert faults({"$ref": "#/components/schemas/ErrorEvent"}, event) == []


def test_an_event_without_its_data_does_not_fit() -> None:
    for cls in LOGGED_FRAMES:
        assert faults({"$ref": f"#/components/schemas/{event_name(cls.__name__)}"}, {"id": 1})


def test_what_origins_read_is_described_as_their_models_say() -> None:
    # `python -m tests.origin_bodies` writes it.
    assert ORIGIN_BODIES.read_text("utf-8") == origin_bodies.text()


def test_the_examples_fit_what_they_are_examples_of() -> None:
    for operation in OPERATIONS:
        for example in operation.examples.values():
            assert faults(operation.body[0].schema, example) == [], operation.name
        for parameter in operation.parameters:
            if parameter.example is not None:
                assert faults(parameter.schema, parameter.example) == [], operation.name


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "description": "does"}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, True),
        ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "c"}]}, True),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}, True),
        ({"messages": [{"role": "nobody", "content": "Hi"}]}, False),
        ({"messages": [{"content": "Hi"}]}, False),
        ({"messages": [{"role": "user", "content": 1}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, False),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, False),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [FLAT_TOOL]}, False),
    ],
)
def test_messages_fit_the_description_if_they_are_taken(
    body: dict[str, Any], is_taken: bool
) -> None:
    said = {"model": "demo", **body}
    assert (faults({"$ref": "#/components/schemas/ChatCompletionRequest"}, said) == []) == is_taken
    try:
        ChatBody.model_validate(said).opens(None, None)
    except CallerError:
        assert not is_taken
    else:
        assert is_taken


@pytest.mark.parametrize(
    ("schema", "body", "is_taken"),
    [
        ("CompletionRequest", {"prompt": "a"}, True),
        ("CompletionRequest", {"prompt": ["a", "b"]}, True),
        ("CompletionRequest", {"prompt": []}, False),
        ("EmbeddingRequest", {"input": ["a"]}, True),
        ("EmbeddingRequest", {"input": [1, 2]}, False),
        ("GenerateRequest", {"prompt": "a", "unread": "pause", "priority": None}, True),
        ("GenerateRequest", {"prompt": "a", "unread": {"then": "never"}}, False),
        ("GenerateRequest", {"prompt": "a", "priority": "first"}, False),
        ("GenerateRequest", {"prompt": "a", "temperature": 3}, False),
        ("MessageRequest", MESSAGE, True),
        ("MessageRequest", MESSAGE | {"stop": "x"}, False),
        ("MessageRequest", MESSAGE | {"container": "x"}, False),
        ("MessageRequest", MESSAGE | {"messages": [{"role": "user"}]}, False),
        ("ResponseRequest", {"input": "a", "tools": [FLAT_TOOL]}, True),
        ("ResponseRequest", {"input": "a", "tools": [TOOL]}, False),
    ],
)
def test_requests_fit_the_description(schema: str, body: dict[str, Any], is_taken: bool) -> None:
    found = faults({"$ref": f"#/components/schemas/{schema}"}, {"model": "demo", **body})
    assert (found == []) == is_taken, found


# ---- the table of requests and answers ----


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_the_cases_of_any_edge_fit(case: dict[str, Any]) -> None:
    asked, wanted = filled(case["request"], VALUES), filled(case["answer"], VALUES)
    status, item = wanted["status"], item_of(asked["path"])
    operation = (item or {}).get(asked["method"].lower())
    if asked["method"] == "OPTIONS" or item is None or operation is None:
        # Nothing is described there, and so nothing is served there.
        code = (wanted.get("error") or {}).get("code")
        assert code in ("foreign_origin", "not_found", "method_not_allowed", None)
        assert status == {None: 405, "foreign_origin": 403, "not_found": 404}.get(code, 405)
        assert (status == 404) == (item is None)
        return
    assert str(status) in operation["responses"], sorted(operation["responses"])
    content = resolved(operation["responses"][str(status)]).get("content", {})
    if "error" in wanted:
        body = {"error": wanted["error"], "request_id": "of Anthropic's API only"}
        assert faults(content["application/json"]["schema"], body | wanted.get("json", {})) == []
        return
    if "json" in wanted:  # which names some of the members
        schema = resolved(content["application/json"]["schema"])
        for name, value in wanted["json"].items():
            assert faults(schema.get("properties", {}).get(name, {}), value) == []
            assert schema == {} or name in schema["properties"]


# ---- what a real edge answers ----


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    house = Origin(tmp_path_factory.mktemp("origin"))
    made = Edge(house)
    async with (
        running(house, made),
        httpx.AsyncClient(base_url=made.url, timeout=TIMEOUT) as client,
    ):
        yield client


REFUSED = {
    "readOwnUsage": 404,  # this edge has no keys
    "openSession": 426,  # no opening handshake is sent
    "createEmbeddings": 400,  # the demo model makes none
    "sendInput": 409,  # the demo model takes none
    "switchStages": 400,  # the demo model is no pipeline
    "applyPolicy": 409,  # an origin of one model has no pool
    "prewarmModel": 409,
    "pinModel": 409,
    **dict.fromkeys((one.name for one in OPERATIONS if one.tag == "Subscriptions"), 404),  # off
    # This edge has no bindings.
    **dict.fromkeys((one.name for one in OPERATIONS if one.tag == "Objects"), 404),
}
"""Operations whose example this edge refuses, and how."""
PREFIXES = {
    "readChatCompletion": "chatcmpl-",
    "readCompletion": "cmpl-",
    "readMessage": "msg_",
    "cancelMessage": "msg_",
    **dict.fromkeys((one.name for one in OPERATIONS if one.tag == "Responses"), "resp_"),
}
SENT: list[Any] = [
    pytest.param(operation, name, accepted, id=f"{operation.name} {name} {accepted}".strip())
    for operation in OPERATIONS
    for name in (operation.examples or {"": None})
    for accepted in (
        [one.media_type for one in operation.answers[200].content]
        if operation.path in ("/v1/generate", "/v1/generate/{id}")
        else [""]
    )
]


@pytest.mark.parametrize(("operation", "example", "accepted"), SENT)
async def test_the_examples_are_answered_as_described(
    edge: httpx.AsyncClient, operation: Operation, example: str, accepted: str
) -> None:
    values = {one.name: str(one.example) for one in operation.parameters if one.example is not None}
    if "id" in values or "{id}" not in operation.path:
        pass
    elif operation.tag == "Responses":
        values["id"] = (await edge.post("/v1/responses", json=RESPONSE)).json()["id"]
    else:
        opened = await edge.post("/v1/generate", json=GENERATED)
        values["id"] = PREFIXES.get(operation.name, "") + opened.headers["Tailrace-Stream"]
    path = re.sub(r"\{(\w+)\}", lambda named: values[named[1]], operation.path)
    query = {one.name: values.get(one.name) for one in operation.parameters if one.place == "query"}
    given = {name: value for name, value in query.items() if value is not None}
    headers = {
        one.name: str(one.example)
        for one in operation.parameters
        if one.place == "header" and one.example is not None
    }
    headers |= {"Accept": accepted} if accepted else {}
    content = None
    if operation.examples:
        headers["Content-Type"] = media_type = operation.body[0].media_type
        body = operation.examples[example]
        content = json.dumps(body) if media_type == "application/json" else body
    for params in [given, {}] if given else [{}]:
        answer = await edge.request(
            operation.method, path, params=params, headers=headers, content=content
        )
        assert unfit(operation, answer) == [], answer.text[:1000]
        statuses = {REFUSED[operation.name]} if operation.name in REFUSED else {*operation.answers}
        if operation.name == "steerStream":
            statuses.add(409)  # the stream may have ended meanwhile
        if operation.name == "explainModel":
            statuses.add(404)  # nothing is recorded of a model that was never asked for
        assert answer.status_code in statuses, answer.text[:1000]


GENERATED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 6, "seed": 1}
RESPONSE = {"model": "demo", "input": "Once upon a time", "max_output_tokens": 6}


def unfit(operation: Operation, answer: httpx.Response) -> list[str]:
    """Return what of an answer is not as the document says."""
    told = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]
    if str(answer.status_code) not in told:
        return [f"status {answer.status_code}"]
    response = resolved(told[str(answer.status_code)])
    missing = [
        f"no {name}"
        for name in ("Tailrace-Stream", "Tailrace-Token", "ETag")
        if name in response.get("headers", {}) and name not in answer.headers
    ]
    content = response.get("content", {})
    if operation.method == "HEAD" or not (content or answer.content):
        return missing
    media_type = answer.headers["Content-Type"].partition(";")[0]
    media = content.get(media_type, content.get("*/*"))
    if media is None:
        return [*missing, f"media type {media_type}"]
    if media_type == "application/json":
        return [*missing, *faults(media["schema"], answer.json())]
    if EVENT_SCHEMA in media:
        is_sse = media_type == "text/event-stream"
        events = events_of(answer.text) if is_sse else lines_of(answer.text)
        assert events
        return [*missing, *(one for event in events for one in faults(media[EVENT_SCHEMA], event))]
    return missing


def lines_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a body of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a body, as the schemas of events have them."""
    events = []
    for block in text.split("\n\n"):
        event: dict[str, Any] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name == "data":
                event["data"] = value if value == "[DONE]" else json.loads(value)
            elif name == "id":
                event["id"] = int(value)
            elif name == "event":
                event["event"] = value
        if event:
            events.append(event)
    return events


async def test_every_get_answers_head(edge: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/openapi.json", "/llms.txt", "/version", "/v1/admin/health"):
        get, head = await edge.get(path), await edge.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["Content-Type"] == get.headers["Content-Type"]


# ---- how the two are served ----


@pytest.fixture
async def keyed() -> AsyncIterator[httpx.AsyncClient]:
    """Yield an edge that has API keys."""
    ring = KeyRing((), {})
    authenticator = Authenticator(ring, lambda: 0.0, lambda: datetime.now(UTC))
    config = EdgeConfig(http=("127.0.0.1:0",))
    transport = httpx.ASGITransport(app_of(access_rules(config, authenticator)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("/openapi.json", "application/json"), ("/llms.txt", "text/plain; charset=utf-8")],
)
async def test_they_need_no_key_and_are_cached_and_compressed(
    keyed: httpx.AsyncClient, path: str, media_type: str
) -> None:
    assert (await keyed.get("/v1/models")).status_code == 401
    for coding in ("gzip", "zstd"):
        answer = await keyed.get(path, headers={"Accept-Encoding": coding})
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, media_type)
        assert answer.headers["Content-Encoding"] == coding
        assert int(answer.headers["Content-Length"]) < len(answer.content) / 2
        tag = answer.headers["ETag"]
        asked = {"Accept-Encoding": coding, "If-None-Match": tag}
        again = await keyed.get(path, headers=asked)
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)


async def test_the_description_that_is_served_is_the_document(keyed: httpx.AsyncClient) -> None:
    assert (await keyed.get("/openapi.json")).json() == DOCUMENT


# ---- the guide ----

GUIDE = LLMS_FILE.read_text("utf-8")
REQUESTS = re.findall(r"```http\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_is_short_and_has_the_form_of_llms_txt() -> None:
    lines = GUIDE.splitlines()
    assert len(lines) < 100
    assert [line for line in lines if line.startswith("# ")] == lines[:1]  # one title, first
    assert lines[2].startswith("> ")  # and a summary


def test_every_path_in_the_guide_is_there() -> None:
    found = re.findall(r"(?<=[ `(])(/[\w./-]+)", GUIDE)
    assert len(found) > 10
    assert [path for path in found if path != "/v1" and item_of(path) is None] == []
    files = re.findall(r"^- `([^`]+)`", GUIDE, re.MULTILINE)
    assert len(files) > 4
    assert [name for name in files if not (ROOT / name).is_file()] == []


async def test_every_request_in_the_guide_works(edge: httpx.AsyncClient) -> None:
    assert len(REQUESTS) == 6
    stream = ""
    for request in REQUESTS:
        head, _, body = request.replace("ID", stream).partition("\n\n")
        line, *fields = head.strip().splitlines()
        method, path = line.split(" ")
        headers = dict(field.split(": ", 1) for field in fields)
        answer = await edge.request(method, path, headers=headers, content=body.strip() or None)
        assert answer.status_code == 200, (line, answer.text)
        if "stream" in headers.get("Accept", ""):
            assert events_of(answer.text)[-1]["event"] == "end"
        stream = stream or answer.headers["Tailrace-Stream"]
