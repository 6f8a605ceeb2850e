"""Shows an origin's streams to operators: lists of active and ended streams, and details of one.

A page is a window of the sorted list, so that viewing ten thousand streams costs no more than
viewing the fifty on screen. A request may have the cursor of an earlier answer. It then gets only
the id and the sort key of each stream that has not changed since that answer, and only the ended
streams that ended since.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from tailrace.ledger.frame import StreamEnd, decode
from tailrace.ledger.frame_json import frame_fields
from tailrace.ledger.interface import Ledger, Record, StreamInfo
from tailrace.ledger.record_extra import StreamLife
from tailrace.origin.admin.query import Document, Query
from tailrace.origin.core.states import StreamState
from tailrace.origin.core.stream import EndedStream, Stream
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.runs import Runs

if TYPE_CHECKING:  # the import needs the package tokenizers, which an origin may lack
    from tailrace.origin.checkpoint.prompt import PromptReader

MAX_PAGE = 1000
"""Maximum number of active streams per page."""
DEFAULT_PAGE = 100
MAX_OFFSET = 1_000_000
MAX_TOLD_ENDED = 100
"""Maximum number of ended streams per page; the latest ones are listed."""

MAX_FRAMES = 1000
"""Maximum number of frames per page of one stream."""
TOLD = set(
    "model fingerprint prompt_sha256 max_tokens sampling ignore_eos completes logprobs priority"
    " unread unread_after_s siblings trace".split()
)
"""Fields of a recipe that operators see without the right to read texts. This is a list of allowed
fields, because a field that is added later may hold a user's words."""
TURN = ("role", "content", "tool_calls", "tool_call_id")
"""Field names of a chat message; a recipe stores only the values, in this order."""


class LivePages:
    """Makes pages of the list of streams.

    `unix_ms` converts times of the metrics' clock, in seconds, to Unix time in ms.
    """

    def __init__(self, runs: Runs, unix_ms: Callable[[float], int]) -> None:
        self._runs = runs
        self._unix_ms = unix_ms
        self._incarnation = secrets.token_hex(4)
        count = runs.readers.count
        self._sorts: dict[str, Callable[[Stream], Any]] = {
            "began_ms": attrgetter("progress.began_s"),
            "last_ms": lambda stream: stream.released_s or 0.0,
            "tokens": attrgetter("made"),
            "frames": attrgetter("progress.next_index"),
            "resumes": attrgetter("progress.resumes"),
            "takeovers": attrgetter("epoch"),
            "readers": lambda stream: count(stream.id),
            "state": state_of,
            "tenant": attrgetter("recipe.tenant"),
            "model": attrgetter("recipe.model"),
            "priority": attrgetter("recipe.priority"),
            "id": attrgetter("id"),
        }

    def page(self, query: Query) -> Document:
        sort = query.word("sort", self._sorts, "began_ms")
        falls = query.word("order", ("asc", "desc"), "desc") == "desc"
        offset = query.number("offset", 0, MAX_OFFSET)
        limit = query.number("limit", DEFAULT_PAGE, MAX_PAGE)
        since = self._since(query.text("since"))
        wanted = {name: query.text(name) for name in ("tenant", "model", "state")}
        prefix = query.text("id").lower()
        query.done()
        live = self._runs.table.by_id.values()
        found = [one for one in live if not prefix or one.id.hex().startswith(prefix)]
        for name, text in wanted.items():  # an empty text is no filter
            if text:
                found = [one for one in found if self._sorts[name](one) == text]
        found.sort(key=self._sorts[sort], reverse=falls)
        lately = [one for one in self._runs.table.ended if one.progress.revision > since]
        return {
            "now_ms": self._unix_ms(self._runs.clock()),
            "live": len(live),
            "paused": self._runs.paused_count,
            "states": Counter(map(state_of, live)),
            "found": len(found),
            "streams": [
                self._row(stream)
                if stream.progress.revision > since
                else {"id": stream.id.hex(), sort: self._row(stream)[sort]}
                for stream in found[offset : offset + limit]
            ],
            "ended": [self._ended(one) for one in lately[: -MAX_TOLD_ENDED - 1 : -1]],
            "cursor": f"{self._incarnation}.{self._runs.table.revision}",
        }

    def live(self, stream: bytes) -> Document | None:
        """Return the list row of a stream that runs or waits here; None for any other stream."""
        known = self._runs.table.by_id.get(stream)
        return None if known is None else self._row(known)

    def ended(self, stream: bytes) -> Document | None:
        """Return the list row of a stream that ended here recently; None for any other stream."""
        found = self._found(stream)
        return None if found is None else self._ended(found)

    def frame_ms(self, stream: bytes) -> Callable[[int], int | None]:
        """Return a function that maps a frame's index to the time of its release, in Unix ms.

        The function returns None if this origin does not know when the frame was released.
        """
        live, ended = self._runs.table.by_id.get(stream), self._found(stream)
        known = live or ended

        def at_ms(index: int) -> int | None:
            at_s = None if known is None else known.progress.time_s(index)
            return None if at_s is None else self._unix_ms(at_s)

        return at_ms

    def _found(self, stream: bytes) -> EndedStream | None:
        return next((one for one in self._runs.table.ended if one.id == stream), None)

    def _since(self, cursors: str) -> int:
        """Return the revision that the client saw last, or -1 if it has no cursor of this origin.

        `cursors` is a comma-separated list with the cursors of several origins.
        """
        for cursor in cursors.split(","):
            incarnation, _, revision = cursor.partition(".")
            if incarnation == self._incarnation and revision.isascii() and revision.isdecimal():
                return int(revision)
        return -1

    def _row(self, stream: Stream) -> Document:
        recipe, progress = stream.recipe, stream.progress
        released_s = stream.released_s
        return {
            "id": stream.id.hex(),
            "tenant": recipe.tenant,
            "model": recipe.model,
            "state": state_of(stream),
            "priority": recipe.priority,
            "began_ms": self._unix_ms(progress.began_s),
            "last_ms": None if released_s is None else self._unix_ms(released_s),
            "tokens": stream.made,
            "frames": progress.next_index,
            "readers": self._runs.readers.count(stream.id),
            "resumes": progress.resumes,
            "takeovers": max(0, stream.epoch - 1),
            "worker": stream.worker,
            "time": progress.time_spent(self._runs.clock()),
        }

    def _ended(self, ended: EndedStream) -> Document:
        return {
            "id": ended.id.hex(),
            "tenant": ended.tenant,
            "model": ended.model,
            "priority": ended.priority,
            "began_ms": self._unix_ms(ended.progress.began_s),
            "ended_ms": self._unix_ms(ended.ended_s),
            "tokens": ended.tokens,
            "frames": ended.progress.next_index,
            "resumes": ended.progress.resumes,
            "takeovers": max(0, ended.epoch - 1),
            "finish_reason": ended.reason.word,
            "time": ended.progress.time_spent(ended.ended_s),
        }


def unix_clock(now_ms: Callable[[], int], clock: Callable[[], float]) -> Callable[[float], int]:
    """Return a function that converts times of `clock`, in seconds, to Unix ms.

    The offset between the clocks is measured only once.
    """
    zero_ms = now_ms() - clock() * 1000
    return lambda at_s: round(zero_ms + at_s * 1000)


def state_of(stream: Stream) -> str:
    """Return the word for a stream's state that operators see."""
    if stream.is_cancelled:
        return "cancelling"
    shown = {StreamState.RUNNING: "running", StreamState.CLAIMING: "starting"}
    return shown.get(stream.state, "waiting")


def encoded(document: Document) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def stored_document(ledger: Ledger, info: StreamInfo) -> Document:
    """Return the facts about a stored stream, without the texts of its prompt and output."""
    recipe = Recipe.model_validate_json(info.recipe)
    record = None
    if info.ended:
        [*_, record] = await ledger.read(info.stream, info.next_index - 1, 1)
    end = None if record is None else decode(record.frame)[1]
    life = None if record is None else StreamLife.of(record)
    return {
        "id": info.stream.hex(),
        "tenant": recipe.tenant,
        "created_ms": info.created_ms,
        "durability": info.durability.name.lower(),
        "epoch": info.epoch,
        "next_index": info.next_index,
        "ended": info.ended,
        "recipe": _settings(recipe),
        "life": None if life is None else life._asdict(),
        "end": None
        if not isinstance(end, StreamEnd)
        else {
            "finish_reason": end.finish_reason.word,
            "total_tokens": end.total_tokens,
            "prompt_tokens": end.prompt_tokens,
            "message": end.message,
            "retryable": end.retryable,
        },
    }


def prompt_document(info: StreamInfo, reader: PromptReader | None) -> Document:
    """Return the prompt or the messages of a stream, for operators who may read texts."""
    recipe = Recipe.model_validate_json(info.recipe)
    if recipe.messages:
        listed = [dict(zip(TURN, turn, strict=False)) for turn in recipe.messages]
        return {"messages": listed, "note": recipe.note}
    if recipe.prompt is not None or reader is None:
        return {"prompt": recipe.prompt}
    return {"prompt": reader.text(recipe.prompt_ids)}


def _settings(recipe: Recipe) -> Document:
    """Return the fields of a recipe without texts; the prompt is shown as its hash and length."""
    told = recipe.model_dump(mode="json", include=TOLD)
    told["prompt_tokens"] = len(recipe.prompt_ids)
    told["format"] = None if recipe.format is None else recipe.format[0]
    told["sampling"] = {key: one for key, one in told["sampling"].items() if one is not None}
    told["stop"] = len(recipe.stop)
    told["tools"] = None if recipe.tools is None else recipe.tools.choice
    return told


def frame_row(record: Record, index: int, at_ms: int | None, *, text: bool) -> Document:
    """Return the row of one frame for operators; with `text`, the row includes its contents."""
    _, frame = decode(record.frame)
    row: Document = {
        "index": index,
        "type": type(frame).__name__,
        "bytes": len(record.frame),
        "tokens": len(record.ids),
        "at_ms": at_ms,
    }
    return row | (frame_fields(frame, brief=True) if text else {})
