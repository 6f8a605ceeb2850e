"""The service of an origin for edges: open, resume, steer and cancel streams, and call objects.

Each method takes a decoded frame and returns a value or raises a `TailraceError`; the link turns
both into frames.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from tailrace.ledger.branch import BranchPoint, check_point
from tailrace.ledger.end_usage import usage_of
from tailrace.ledger.errors import (
    BeyondEnd,
    CallerError,
    Conflict,
    NotFound,
    Unauthorized,
    Unavailable,
)
from tailrace.ledger.frame import (
    CALL_METHODS,
    LINK_CODEC,
    SAFE_METHODS,
    STREAM_ID_BYTES,
    Call,
    Cancel,
    Heartbeat,
    Input,
    InputStored,
    Open,
    Opened,
    Renew,
    Resume,
    Sibling,
    Status,
    Steer,
    StreamState,
    SwitchStages,
)
from tailrace.ledger.interface import Append, Ledger, NewStream, ObjectKey, StreamInfo
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS
from tailrace.ledger.links.hints import HINT, Hint
from tailrace.ledger.links.own_usage import OWN_USAGE
from tailrace.ledger.links.rights import OF_A_STREAM, Right
from tailrace.ledger.links.token_count import TOKEN_COUNT
from tailrace.ledger.objects.deployment import DEPLOYMENT
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.origin.admin.query import Query
from tailrace.origin.config import LedgerConfig, OriginConfig
from tailrace.origin.core.budgets import has_budget
from tailrace.origin.core.model import ServedModel
from tailrace.origin.core.stream import TEXT
from tailrace.origin.edges.peer_frame import ObjectCall
from tailrace.origin.generations.admission import admit, asks_of_engine, check_count, request_hash
from tailrace.origin.generations.branch import (
    Parent,
    branch_recipe,
    check_branch,
    inserted_ids,
    needs_log,
)
from tailrace.origin.generations.frame_times import index_since
from tailrace.origin.generations.known_answers import (
    KnownAnswer,
    identity_of,
    known_answer,
    last_records,
    may_answer,
)
from tailrace.origin.generations.permissions import (
    PIPELINES,
    check_right,
    generation,
    key_of,
    name_of,
    no_subscriptions,
    rights_on,
)
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.resume_tokens import TokenKeys, VerifiedToken
from tailrace.origin.generations.runs import Runs
from tailrace.origin.generations.stage_switches import check_switches
from tailrace.origin.generations.stream_log import History
from tailrace.origin.generations.usage import usage_of_key
from tailrace.origin.objects.byte_logs import BYTE_LOG, LAST, LIMIT, OFFSET
from tailrace.origin.pipelines.switches import MAX_REQUESTS_BYTES, REQUESTS, request_line
from tailrace.origin.streams.protocol import generation_id
from tailrace.origin.subscriptions.request import SUBSCRIPTION, object_of

if TYPE_CHECKING:  # the import needs the package tokenizers, which an origin may lack
    from tailrace.origin.checkpoint.prompt import PromptReader

CHAT = "chat"
"""Class of the objects that store chats; an object's name is the id of its chat."""
CANCEL_TIMEOUT_S = 5.0
"""Maximum seconds that a cancel waits for the stream's end. A stream that has not ended by then is
reported as running."""
LEDGER_SILENCE_S = 5.0
"""If the ledger has not answered for this many seconds, the origin reports that it is not ready."""
LONG_CHARS = 8 * 1024
"""Maximum characters of a text that is tokenised on the event loop; longer ones use a thread."""
SEEDS = 1 << 64
CORRS = 60 * 1024
"""Maximum number of simultaneous streams and Calls on one link, as announced to edges."""

TOLD_BY_EDGES = tuple(one for one in Hint if one is not Hint.OPERATOR)
OPERATOR = "operator"
"""Class of the objects that answer admin requests; an object's name is the path of a route."""

log = structlog.get_logger("origin")


class Objects(Protocol):
    """The interface of the object runtime."""

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...

    async def fetch_here(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...

    async def deploy(self, script: str, request: ObjectRequest) -> ObjectResponse: ...

    def kind_of(self, called: str) -> str: ...


AdminCall = Callable[[str, ObjectRequest], Awaitable[ObjectResponse]]
"""Type of the handler of admin requests, whose arguments are a route's path and the request."""


async def no_admin(asked: str, request: ObjectRequest) -> ObjectResponse:
    raise NotFound("this origin has no admin API")


@dataclass(frozen=True, slots=True)
class Service:
    """The API of one origin for edges.

    `now_ms` returns Unix time in ms. `random` returns random bytes, for stream ids and seeds.
    `inputs` has the maximum number of bytes of an input, by pipeline that takes input.
    """

    ledger: Ledger
    objects: Objects
    runs: Runs
    keys: TokenKeys
    config: OriginConfig
    retention: LedgerConfig
    now_ms: Callable[[], int]
    random: Callable[[int], bytes] = secrets.token_bytes
    admin: AdminCall = no_admin
    inputs: Mapping[str, int] = field(default_factory=dict)
    _endings: dict[bytes, asyncio.Task[StreamInfo]] = field(default_factory=dict, init=False)

    async def open(self, request: Open) -> Opened:
        """Create and start a stream, or return the stream of an earlier request with the same key.

        The `n` streams of a request are created atomically, even if the origin crashes.
        """
        check_count(request)
        check_right(request.caller, Right.GENERATE)
        may_cache = may_answer(request, by_default=self.config.cache == "exact")
        given = OF_A_STREAM if request.caller is None else Right(request.caller.rights)
        # A repeated idempotency key gets the existing stream, even if there is no room for new
        # ones.
        key = key_of(request.caller, request.idempotency_key)
        if key is not None:
            earlier = await self.ledger.made_by(key, request_hash(request))
            if earlier is not None:
                return self._opened(earlier, given)
        if request.caller is not None and has_budget(request.caller):
            await self.runs.spending.know(request.caller.key)
        parent = await self._parent(request)
        wanted = request.model if parent is None else parent.recipe.model
        ids = [self.random(STREAM_ID_BYTES) for _ in range(request.n)]
        with self.runs.room(ids, request.priority, request.caller, model=wanted) as model:
            asks = asks_of_engine(request) or parent is not None
            known = self._reader_of(model.name) is not None or not asks
            async with self.runs.opening(model, ids[0], known=known) as told:
                admitted = self._admit if parent is None else partial(self._branch, parent)
                recipe = self.runs.core.shedding.shortened(await admitted(request, model))
                answer = await self._known(request, recipe) if may_cache else None
                info = await self._answer(request, recipe, ids[0], key, answer)
                if info is None:
                    info = await self._start(request, recipe, told, ids, key)
        return self._opened(await self.ledger.info(info.stream), given)

    async def _start(
        self, request: Open, recipe: Recipe, told: str, ids: Sequence[bytes], key: str | None
    ) -> StreamInfo:
        """Create the streams of a request and start them; `told` is a notice for their readers."""
        if told:
            recipe = recipe.model_copy(update={"notices": (("loading", told), *recipe.notices)})
        others = [(id_, _choice(recipe, nth)) for nth, id_ in enumerate(ids) if nth]
        first = recipe.model_copy(update={"siblings": tuple(id_.hex() for id_ in ids[1:])})
        info, created = await self.ledger.create(
            self._new(ids[0], first, request, key),
            *(self._new(other_id, other, request) for other_id, other in others),
        )
        if created:
            await self.runs.start(
                (info.stream, first), *others, read=request.credit > 0, waited=bool(told)
            )
        return info

    async def _known(self, request: Open, recipe: Recipe) -> KnownAnswer | None:
        """Return the answer that the ledger has to an identical request, if any."""
        identity = _identity(request, recipe)
        found = await self.ledger.known(identity) if identity else None
        if found is None or not found.ended:
            return None
        try:
            history = await self.runs.history(found.stream, 0, found.next_index)
            last = await self.ledger.read(found.stream, found.next_index - 1, 1)
        except NotFound:  # the stream was deleted, or has expired, meanwhile
            return None
        return known_answer(found.stream, history, last[0], recipe.fingerprint) if last else None

    async def _answer(
        self,
        request: Open,
        recipe: Recipe,
        stream: bytes,
        key: str | None,
        answer: KnownAnswer | None,
    ) -> StreamInfo | None:
        """Create a stream with the frames of a known answer, so that no worker computes it.

        The result is None if there is no answer, or if the stream that holds it was deleted.
        """
        if answer is None:
            return None
        known = recipe.model_copy(update={"base": answer.shared, "notices": ()})
        base = BranchPoint(answer.stream, answer.shared)
        new = replace(self._new(stream, known, request, key), base=base)
        try:
            info, created = await self.ledger.create(
                replace(new, identity=_identity(request, recipe))
            )
        except NotFound:
            return None
        if created:
            appends = [
                Append(info.stream, info.epoch, index, record)
                for index, record in enumerate(last_records(answer, self.now_ms()), answer.shared)
            ]
            for refusal in await self.ledger.append(appends):
                raise refusal.error
            self.runs.answered()
        return info

    async def _admit(self, request: Open, model: ServedModel) -> Recipe:
        # `ready` is None for a model that was never loaded. Its name then comes from the settings.
        ready = model.ready
        checked = partial(
            admit,
            request,
            model=model.name if ready is None else ready.model,
            fingerprint="" if ready is None else ready.fingerprint,
            reader=None if ready and ready.kind == TEXT else self._reader_of(request.model),
            offers=() if ready is None else ready.offers,
            stages=self.runs.models.stages(model.name),
            draw_seed=self._draw_seed,
        )
        # Long requests are checked in a thread. Tokenising a megabyte takes a second, compiling a
        # schema takes 50 ms, and a chat template in its own process may run into its timeout.
        return await asyncio.to_thread(checked) if _is_long(request) else checked()

    async def _parent(self, request: Open) -> Parent | None:
        """Return the stream that a request branches, if any; the caller must be able to read it."""
        point = request.branch
        if point is None:
            return None
        named = Resume(point.stream, token=point.token, caller=request.caller)
        info, _ = await self._allowed(named, Right.READ)
        parent = Parent(info, Recipe.model_validate_json(info.recipe), point)
        check_branch(request, parent)
        check_point(point.index, info.next_index, ended=info.ended)
        return parent

    async def _branch(self, parent: Parent, request: Open, model: ServedModel) -> Recipe:
        """Return the recipe of a branch."""
        ready, shared = model.ready, History()
        if needs_log(request, parent):
            begin, end = parent.recipe.begin, parent.point.index
            shared = await self.runs.history(parent.info.stream, begin, end)
        checked = partial(
            branch_recipe,
            request,
            parent,
            shared,
            reader=None if ready and ready.kind == TEXT else self._reader_of(model.name),
            fingerprint="" if ready is None else ready.fingerprint,
            offers=() if ready is None else ready.offers,
            draw_seed=self._draw_seed,
        )
        added = parent.point.text or parent.point.instruction
        return await asyncio.to_thread(checked) if added else checked()

    def _draw_seed(self) -> int:
        return int.from_bytes(self.random(8), "little")

    def _reader_of(self, model: str) -> PromptReader | None:
        """Return the tokenizer of a model's prompts; None if its workers are of kind `text`."""
        return self.runs.models.reader(model)

    def _new(
        self, stream: bytes, recipe: Recipe, request: Open, key: str | None = None
    ) -> NewStream:
        branch = request.branch
        return NewStream(
            stream=stream,
            recipe=recipe.model_dump_json(),
            durability=request.durability,
            ttl_s=self.retention.retention_s,
            idempotency_key=key,
            request_hash=request_hash(request),
            base=None if branch is None else BranchPoint(branch.stream, branch.index),
            identity=_identity(request, recipe),
        )

    async def resume(self, request: Resume | Renew) -> Opened:
        """Return the answer to a reader that continues a stream after index `request.after`.

        A Renew comes from an edge that has already shown a valid token for this stream. So a Renew
        needs no token, and its reader can continue even if the token has expired meanwhile.
        """
        rights = Right(0)
        if isinstance(request, Renew):
            self.keys.check_pass(request.mac, request.stream)
            info = await generation(self.ledger, request.stream)
        else:
            info, rights = await self._allowed(request, Right.READ)
        if request.after is not None and request.after >= info.next_index:
            last = info.next_index - 1
            raise BeyondEnd(
                f"index {request.after} is beyond the stream's last, {last}"
                if last >= 0
                else f"index {request.after} of a stream that has no frame yet",
                field="after",
                hint=f"at most {last}" if last >= 0 else "leave it out",
            )
        if isinstance(request, Renew):
            # The edge already has the other fields of Opened. They stay empty to save time, because
            # tens of thousands of renewals may arrive at once.
            return Opened(info.stream, info.next_index, "", "", 0, first=request.start)
        opened = replace(self._opened(info, rights), first=await self._first(request, info))
        self.runs.resumed(info.stream)
        self._hint(Hint.RECONNECT, opened.model)
        return opened

    async def _first(self, request: Resume, info: StreamInfo) -> int:
        """Return the index of the first frame that a reader gets."""
        if request.after is None and request.tail is not None:
            return max(0, info.next_index - request.tail)
        if request.after is None and request.since_ms is not None:
            return await index_since(self.ledger, info, request.since_ms)
        return request.start

    async def cancel(self, request: Cancel) -> Status:
        """Cancel a stream unless it has ended; with `forget`, delete it from the ledger."""
        info, _ = await self._allowed(request, Right.CANCEL)
        info = await self.end(info)
        if request.forget:
            if not info.ended:
                raise Unavailable(
                    "the stream has not ended yet, so it was not deleted", hint="repeat the request"
                )
            # Deliveries cannot be counted after the deletion.
            await self.runs.store_deliveries(ended=info.stream)
            with suppress(NotFound):  # another request, or retention, may have deleted the stream
                await self.ledger.delete(info.stream)
        return status(info)

    async def end(self, info: StreamInfo) -> StreamInfo:
        """Cancel a stream and wait up to CANCEL_TIMEOUT_S for its end.

        Concurrent calls for the same stream share one wait.
        """
        if info.ended:
            return info
        stream = info.stream
        ending = self._endings.get(stream)
        if ending is None:
            ending = self._endings[stream] = asyncio.create_task(self._end(info))
            ending.add_done_callback(lambda _: self._endings.pop(stream))
        return await asyncio.shield(ending)

    async def _end(self, info: StreamInfo) -> StreamInfo:
        changed = asyncio.Event()
        self.ledger.watch(info.stream, changed.set)
        try:
            await self.runs.cancel(info.stream)
            with suppress(TimeoutError):  # the result then shows a stream that has not ended
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    while not (info := await self.ledger.info(info.stream)).ended:
                        changed.clear()
                        await changed.wait()
        finally:
            self.ledger.unwatch(info.stream, changed.set)
        return info

    async def steer(self, request: Steer) -> Status:
        """Insert text into a running stream; return when it is durable in the stream's log."""
        info, _ = await self._allowed(request, Right.STEER)
        ids = await self._steer_ids(info, request.text)
        await self.runs.steer(info.stream, ids)
        return status(await self.ledger.info(info.stream))

    async def _steer_ids(self, info: StreamInfo, text: str) -> tuple[int, ...]:
        recipe = Recipe.model_validate_json(info.recipe)
        if info.ended:
            raise Conflict(
                "the stream has ended", hint="open a new stream with the text in its prompt"
            )
        reader = self._reader_of(recipe.model)
        encoded = partial(inserted_ids, recipe, text, reader, room=recipe.max_tokens)
        return await asyncio.to_thread(encoded) if len(text) > LONG_CHARS else encoded()

    async def input(self, request: Input) -> InputStored:
        """Store bytes for the input of a running pipeline; return when they are durable."""
        info, _ = await self._allowed(request, Right.STEER)
        limit = self.inputs.get(Recipe.model_validate_json(info.recipe).model)
        if limit is None:
            raise Conflict(
                "the model of this stream takes no input",
                code="no_input",
                hint="for a pipeline, the origin's operator can set `input`",
            )
        if info.ended:
            raise Conflict("the stream has ended", code="stream_ended", hint="open a new stream")
        head = ((OFFSET, str(request.offset)), (LAST, str(int(request.last))), (LIMIT, str(limit)))
        key = ObjectKey(BYTE_LOG, request.stream.hex())
        response = await self.objects.fetch(key, ObjectRequest("POST", "", head, request.data))
        assert isinstance(response.body, bytes)
        stored = json.loads(response.body)
        return InputStored(request.stream, stored["bytes"], stored["complete"])

    async def switch_stages(self, request: SwitchStages) -> Status:
        """Store a request to switch stages of a running pipeline; return when it is durable."""
        info, _ = await self._allowed(request, Right.STEER)
        model = Recipe.model_validate_json(info.recipe).model
        if not request.stages:
            raise CallerError(
                "no stage is named", field="stages", hint='write for instance {"punctuate": false}'
            )
        check_switches(request.stages, self.runs.models.stages(model), model)
        if info.ended:
            raise Conflict("the stream has ended", code="stream_ended", hint="open a new stream")
        head = ((LIMIT, str(MAX_REQUESTS_BYTES)),)
        key = ObjectKey(BYTE_LOG, f"{request.stream.hex()}:{REQUESTS}")
        body = request_line(request.stages)
        await self.objects.fetch(key, ObjectRequest("POST", "", head, body))
        return status(info)

    async def _allowed(
        self, request: Resume | Cancel | Steer | Input | SwitchStages, right: Right
    ) -> tuple[StreamInfo, Right]:
        """Return a stream and the caller's rights on it, which must include `right`."""
        verified = self._check(request.token, request.stream, right)
        info = await generation(self.ledger, request.stream)
        tenant = _tenant(info)
        return info, rights_on(request.stream, tenant, request.caller, verified, right)

    async def call(self, call: Call) -> ObjectResponse:
        """Pass an edge's request to the handler for the object's class: see `_HANDLERS`."""
        if call.method not in CALL_METHODS:
            raise CallerError("no such method", code="method_not_allowed", status=405)
        own = Service._call_own if "/" in call.object else Service._refuse_class
        return await _HANDLERS.get(call.object, own)(self, call, _request(call))

    async def _call_stream(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        stream = generation_id(call.name)
        if stream is not None and await self._is_generation(stream, call, request):
            return await self._read(stream, ObjectKey(call.object, call.name), request)
        check_right(call.caller, _right_to(call.method))
        return await self._fetch(ObjectKey(call.object, call.name), call, request)

    async def _call_chat(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        check_right(call.caller, _right_on_chat(call))
        return await self._fetch(ObjectKey(CHAT, call.name), call, request)

    async def _call_subscription(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        if call.caller is not None:
            raise no_subscriptions()
        return await self._fetch(object_of(call.name), call, request)

    async def _call_byte_log(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        """Let the worker of a pipeline use the byte logs of a stream of its client's tenant.

        It only reads the stream's input, which the client writes.
        """
        tenant = "" if call.caller is None else call.caller.tenant
        name, _, stage = call.name.partition(":")
        stream = generation_id(name)
        is_allowed = stage or call.method != "POST"
        if not tenant.startswith(PIPELINES) or stream is None or not is_allowed:
            raise _no_class(call)
        if _tenant(await generation(self.ledger, stream)) != tenant.removeprefix(PIPELINES):
            raise _no_class(call)
        return await self.objects.fetch(ObjectKey(BYTE_LOG, call.name), request)

    async def _call_operator(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        check_right(call.caller, Right.ADMIN)
        return await self.admin(call.name, request)

    async def _call_usage(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        query = Query(request.url).rest()
        document = await usage_of_key(self.ledger, self.runs, call.caller, query, self.now_ms())
        headers = (("content-type", "application/json"), ("cache-control", "no-store"))
        return ObjectResponse(200, headers, json.dumps(document).encode())

    async def _call_hint(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        _require_edge(call)
        return self._hinted(call)

    async def _call_token_count(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        """Return the number of tokens of an Open's prompt; the Open is checked and not started."""
        check_right(call.caller, Right.GENERATE)
        _, wanted = LINK_CODEC.decode(call.body)
        if not isinstance(wanted, Open):
            raise CallerError("the body is not an Open frame", field="body")
        model = self.runs.models.find(wanted.model)
        if self._reader_of(model.name) is None:
            raise Conflict(
                "this origin cannot count tokens for this model,"
                " because an upstream server tokenizes its prompts",
                code="unsupported",
                field="model",
                hint="generate an answer: its usage has the number of prompt tokens",
            )
        recipe = await self._admit(wanted, model)
        return ObjectResponse(200, body=str(len(recipe.prompt_ids)).encode())

    async def _call_cached_tokens(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        """Return how many tokens of an ended stream's prompt came from a KV cache."""
        _, wanted = LINK_CODEC.decode(call.body)
        if not isinstance(wanted, Resume):
            raise CallerError("the body is not a Resume frame", field="body")
        info, _ = await self._allowed(replace(wanted, caller=call.caller), Right.READ)
        if not info.ended:
            raise Conflict("the stream has not ended", hint="read its StreamEnd first")
        [end] = await self.ledger.read(info.stream, info.next_index - 1, 1)
        usage = usage_of(info.stream, end)
        return ObjectResponse(200, body=str(0 if usage is None else usage.cached_tokens).encode())

    async def _call_deployment(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        _require_edge(call)
        return await self.objects.deploy(call.name, request)

    async def _call_own(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        """Call an object of a deployed class, which the Call names as SCRIPT/CLASS."""
        check_right(call.caller, _right_to(call.method))
        return await self._fetch(
            ObjectKey(self.objects.kind_of(call.object), call.name), call, request
        )

    async def _refuse_class(self, call: Call, request: ObjectRequest) -> ObjectResponse:
        raise _no_class(call)

    async def _fetch(self, key: ObjectKey, call: Call, request: ObjectRequest) -> ObjectResponse:
        """Send a request to the object of this name that belongs to the caller's tenant."""
        return await self.objects.fetch(
            ObjectKey(key.kind, name_of(call.caller, key.name)), request
        )

    def _hint(self, hint: Hint, model: str) -> None:
        """Tell the pool that a model may soon be requested, or any model if the name is empty."""
        self.runs.models.live.hint(hint, model)

    def _hinted(self, call: Call) -> ObjectResponse:
        """Answer the Call by which an edge hints that a model may soon be requested."""
        if call.name not in TOLD_BY_EDGES:
            hint = ", ".join(one.value for one in TOLD_BY_EDGES)
            raise CallerError(
                f"{call.name!r} is not a kind of hint", field="name", hint=f"use one of {hint}"
            )
        self._hint(Hint(call.name), call.body.decode(errors="replace"))
        return ObjectResponse(204)

    async def _read(self, stream: bytes, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Read a generation through the Durable Streams API; its client counts as a reader."""
        readers = self.runs.readers
        with readers.reading(stream):
            response = await self.objects.fetch(key, request)
        if isinstance(response.body, bytes):
            return response
        return replace(response, body=readers.counted(stream, response.body))

    async def peer_call(self, call: ObjectCall) -> ObjectResponse:
        """Pass a request of another origin, which has checked all rights, to an object here."""
        request = replace(_request(call), operation=call.operation)
        return await self.objects.fetch_here(ObjectKey(call.object, call.name), request)

    async def _is_generation(self, stream: bytes, call: Call, request: ObjectRequest) -> bool:
        """Return True if the id belongs to a generation; raises unless the caller may read it.

        The caller needs the same rights as to resume the generation.
        """
        try:
            info = await generation(self.ledger, stream)
        except NotFound:
            return False  # no generation has this id, so it must be the name of an object
        verified = self._check(request.header("tailrace-token"), stream, Right.READ)
        rights_on(stream, _tenant(info), call.caller, verified, Right.READ)
        return True

    def heartbeat(self) -> Heartbeat:
        models = self.runs.models
        reasons = (*models.reasons, *self._silence(), *filter(None, [self.ledger.shortage()]))
        return Heartbeat(
            clock_ms=self.now_ms(),
            ready=not reasons,
            reasons=reasons,
            models=models.names,
            devices=tuple({model.ready.device: 0 for model in models.core.models if model.ready}),
            patience_ms=round(self.retention.silence_timeout_s * 1000),
            streams=self.runs.table.count,
            room=self.config.max_streams,
            corrs=CORRS,
            ledger=self.ledger.name,
            tiers=models.tiers(),
        )

    def _silence(self) -> tuple[str, ...]:
        silent_s = self.ledger.silent_s()
        if silent_s < LEDGER_SILENCE_S:
            return ()
        log.warning("ledger.silent", seconds=round(silent_s, 1))
        return ("the ledger does not answer",)

    def _check(self, token: str | None, stream: bytes, right: Right) -> VerifiedToken | None:
        """Return the contents of a request's resume token; None if it has none.

        Raises if the token is invalid, or if it is missing and required.
        """
        if token is not None:
            return self.keys.check(token, stream, right, self.now_ms())
        if self.config.require_token:
            raise Unauthorized(
                "this origin needs a resume token",
                field="token",
                hint="send the Tailrace-Token of the response that opened the stream",
            )
        return None

    def _opened(self, info: StreamInfo, rights: Right) -> Opened:
        """Return the answer to an Open or a Resume; its tokens give only rights the caller has."""
        recipe = Recipe.model_validate_json(info.recipe)
        siblings = [bytes.fromhex(stream) for stream in recipe.siblings]
        return Opened(
            stream=info.stream,
            next_index=info.next_index,
            token=self._token(info.stream, rights, recipe.tenant),
            model=recipe.model,
            prompt_tokens=len(recipe.prompt_ids),
            siblings=tuple(
                Sibling(stream, self._token(stream, rights, recipe.tenant)) for stream in siblings
            ),
            created_ms=info.created_ms,
            note=recipe.note,
        )

    def _token(self, stream: bytes, rights: Right, tenant: str) -> str:
        expires_ms = self.now_ms() + int(self.retention.retention_s * 1000)
        return self.keys.issue(stream, rights & OF_A_STREAM, expires_ms, tenant)


def status(info: StreamInfo) -> Status:
    state = StreamState.ENDED if info.ended else StreamState.RUNNING
    return Status(info.stream, state, info.next_index)


def _tenant(info: StreamInfo) -> str:
    return Recipe.model_validate_json(info.recipe).tenant


def _right_to(method: str) -> Right:
    return Right.STREAM_READ if method in SAFE_METHODS else Right.STREAM_WRITE


def _right_on_chat(call: Call) -> Right:
    """Return the right that a caller needs to add a turn, to read a chat, or to stop its turns.

    An edge asks for the running turns in order to cancel them.
    """
    if call.method != "GET":
        return Right.GENERATE
    return Right.CANCEL if Query(call.url).flag("running") else Right.READ


def _request(call: Call | ObjectCall) -> ObjectRequest:
    headers = tuple((header.name, header.value) for header in call.headers)
    return ObjectRequest(call.method, call.url, headers, call.body)


def _require_edge(call: Call) -> None:
    """Raise NotFound if an edge makes this Call for a client, and not on its own behalf."""
    if call.caller is not None:
        raise _no_class(call)


def _no_class(call: Call) -> NotFound:
    return NotFound(f"no objects of class {call.object!r}")


_HANDLERS: dict[str, Callable[[Service, Call, ObjectRequest], Awaitable[ObjectResponse]]] = {
    "stream": Service._call_stream,
    CHAT: Service._call_chat,
    SUBSCRIPTION: Service._call_subscription,
    OPERATOR: Service._call_operator,
    HINT: Service._call_hint,
    TOKEN_COUNT: Service._call_token_count,
    CACHED_TOKENS: Service._call_cached_tokens,
    OWN_USAGE: Service._call_usage,
    BYTE_LOG: Service._call_byte_log,
    DEPLOYMENT: Service._call_deployment,
}
"""Handlers of Calls, by the name of the object's class. `Service._call_own` handles the classes of
deployed scripts, whose names are SCRIPT/CLASS."""


def _identity(request: Open, recipe: Recipe) -> bytes:
    if request.branch is not None:
        return b""
    return identity_of(recipe, names_seed=request.sampling.seed is not None)


def _choice(recipe: Recipe, nth: int) -> Recipe:
    """Return the recipe of the nth stream of a request, which differs only in its seed."""
    seed = ((recipe.sampling.seed or 0) + nth) % SEEDS
    return recipe.model_copy(update={"sampling": replace(recipe.sampling, seed=seed)})


def _is_long(request: Open) -> bool:
    chars = len(request.prompt or "")
    return bool(request.messages) or request.format is not None or chars > LONG_CHARS
