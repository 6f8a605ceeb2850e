"""Branches of generations: the recipe of a stream that begins with the frames of another one.

The new stream continues from the token ids in its parent's log, just as a stream continues after
the death of its worker. So the shared frames are exactly those of the parent. The new stream has
the settings of its parent, except those that the request gives. The functions do no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.ledger.errors import CallerError, Conflict, Forbidden, TailraceError, TooLarge
from tailrace.ledger.frame import SAMPLING, Branch, Message, Open, Overflow, Sampling
from tailrace.ledger.interface import StreamInfo
from tailrace.origin.core.quotas import tenant_of
from tailrace.origin.generations.admission import (
    ALL_THERE_IS,
    check_ranges,
    new_stream,
    settled,
    turn,
    unsupported,
)
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import BRANCH

if TYPE_CHECKING:  # the import needs the package tokenizers, which an origin may lack
    from tailrace.origin.checkpoint.prompt import PromptReader

MAX_STEER_TOKENS = 8 * 1024
MAX_STEER_CHARS = 64 * 1024
"""Maximum characters of text to insert into a stream; longer texts are refused."""
_OF_THE_PARENT = ("prompt", "messages", "format", "tools", "stages")
"""Fields of a request that a branch always takes from its parent."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The stream that a request branches, and the point of the branch."""

    info: StreamInfo
    recipe: Recipe
    point: Branch


def check_branch(request: Open, parent: Parent) -> None:
    """Check the fields of a request to branch a stream that do not depend on a model.

    Raises:
        CallerError: A field belongs to the parent, or its value is invalid.
        Conflict: The stream cannot be branched at this index.
        Forbidden: The stream belongs to another tenant than the caller.
    """
    recipe, point = parent.recipe, parent.point
    if tenant_of(request.caller) != recipe.tenant:
        raise Forbidden(
            "the stream belongs to another tenant, so it can be read here but not branched",
            field="id",
            hint="use an API key of the tenant that began the stream",
        )
    for name in _OF_THE_PARENT:
        if getattr(request, name):
            raise _belongs_to_parent(name)
    if request.overflow is not Overflow.REFUSE:
        raise _belongs_to_parent("overflow")
    if request.model not in ("", recipe.model):
        raise CallerError(
            f"is {request.model!r}, but the branch has the model of its parent, {recipe.model!r}",
            field="model",
            hint="leave it out",
        )
    if point.text is not None and point.instruction is not None:
        raise CallerError(
            "the request has both a text and an instruction",
            field="instruction",
            hint="give one of them: text is the model's own, an instruction is the user's",
        )
    if point.index < recipe.begin:
        raise Conflict(
            f"index {point.index} is before index {recipe.begin}, where the stream's own"
            " instruction was added",
            code="cannot_branch",
            field="index",
            hint=f"at least {recipe.begin}, or branch the parent of this stream",
        )
    check_ranges(request)


def needs_log(request: Open, parent: Parent) -> bool:
    """Return True if the recipe of the branch depends on the tokens of the shared frames."""
    point = parent.point
    has_more = request.max_tokens is not None or point.text is not None
    return has_more or point.instruction is not None


def branch_recipe(
    request: Open,
    parent: Parent,
    shared: History,
    *,
    reader: PromptReader | None,
    fingerprint: str,
    offers: Collection[str],
    draw_seed: Callable[[], int],
) -> Recipe:
    """Return the recipe of a branch, whose request `check_branch` has accepted.

    Args:
        request: The request.
        parent: The stream that the request branches.
        shared: The log of the parent up to the point of the branch, if `needs_log` is True.
        reader: Tokenizes prompts for the model; None for a worker of kind `text`.
        fingerprint: The current fingerprint of the model, empty if the model was never loaded.
        offers: The optional fields that a worker of kind `text` supports.
        draw_seed: Returns a new seed, used if the request gives none.

    Raises:
        CallerError: A field is invalid for this stream.
        Conflict: The model or its worker cannot do what is requested.
    """
    recipe, point = parent.recipe, parent.point
    if (reader is None) != (not recipe.prompt_ids):
        raise _cannot("is now served by workers of another kind than when the stream began")
    if reader is None and point.index and BRANCH not in offers:
        raise _cannot("is served by a worker that cannot continue an answer from its middle")
    if reader is None and request.logprobs is not None and "logprobs" not in offers:
        raise unsupported("logprobs")
    drawn = Sampling(seed=draw_seed())
    changed: dict[str, Any] = new_stream(request) | {
        "tenant": recipe.tenant,
        "siblings": (),
        "sampling": settled(request.sampling, drawn, recipe.sampling),
        "stop": request.stop or recipe.stop,
        "ignore_eos": request.ignore_eos or recipe.ignore_eos,
        "logprobs": recipe.logprobs if request.logprobs is None else request.logprobs,
        "notices": tuple((one.code, one.message) for one in recipe.first_notices(point.index)),
        "base": point.index,
        "inserted_ids": packed_ids(()),
    }
    if recipe.given is not None:
        given = {name for name in SAMPLING if getattr(request.sampling, name) is not None}
        changed["given"] = tuple(name for name in SAMPLING if name in {*given, *recipe.given})
    changed["max_tokens"] = min(request.max_tokens or recipe.max_tokens, ALL_THERE_IS)
    made = recipe.model_copy(update=changed)
    if point.instruction is not None:
        return _instructed(made, point.instruction, shared, reader, fingerprint)
    if reader is not None:
        made = _within_context(made, reader)
    if request.max_tokens is not None and len(shared.ids) >= made.max_tokens:
        raise CallerError(
            f"is {request.max_tokens}, but the shared frames have {len(shared.ids)} tokens already",
            field="max_tokens",
            hint=f"at least {len(shared.ids) + 1}: the shared tokens count, too",
        )
    if point.text is None:
        return made
    ids = inserted_ids(made, point.text, reader, room=made.max_tokens - len(shared.ids))
    return made.model_copy(update={"inserted_ids": packed_ids(ids)})


def inserted_ids(
    recipe: Recipe, text: str, reader: PromptReader | None, *, room: int
) -> tuple[int, ...]:
    """Return the token ids of a text that is inserted into a stream with room for `room` tokens.

    Raises:
        CallerError: The text is empty or too long.
        Conflict: The stream cannot take any text.
    """
    if reader is None or not recipe.prompt_ids:
        raise cannot_insert("the worker of this stream cannot insert text into its output")
    if recipe.format is not None:
        raise cannot_insert("the stream has an output format, and inserted text could violate it")
    if recipe.tools is not None and recipe.tools.forced:
        raise cannot_insert("the stream may contain only tool calls, so no text can be inserted")
    if len(text) > MAX_STEER_CHARS:
        raise TooLarge(
            f"{len(text)} characters", status=400, field="text", hint=f"at most {MAX_STEER_CHARS}"
        )
    ids = reader.steer_ids(text)
    if not ids:
        raise CallerError("is empty", field="text", hint="give at least one character")
    if len(ids) > min(MAX_STEER_TOKENS, room - 1):
        raise TooLarge(
            f"{len(ids)} tokens",
            status=400,
            field="text",
            hint=f"fewer than the stream's max_tokens, and at most {MAX_STEER_TOKENS}",
        )
    return ids


def cannot_insert(why: str) -> Conflict:
    return Conflict(why, code="unsupported", field="text", hint="open a new stream instead")


def _instructed(
    recipe: Recipe,
    instruction: str,
    shared: History,
    reader: PromptReader | None,
    fingerprint: str,
) -> Recipe:
    """Return the recipe of a branch whose prompt is the conversation with one more message.

    The shared frames are part of the branch's prompt, so its output begins after them.
    """
    if not instruction:
        raise CallerError("is empty", field="instruction", hint="give at least one character")
    if len(instruction) > MAX_STEER_CHARS:
        raise TooLarge(
            f"{len(instruction)} characters",
            status=400,
            field="instruction",
            hint=f"at most {MAX_STEER_CHARS}",
        )
    changed: dict[str, Any] = {"begin": recipe.base, "fingerprint": fingerprint}
    if reader is None:
        if not recipe.messages:
            raise _no_conversation()
        answer, asked = Message("assistant", shared.text.text), Message("user", instruction)
        changed["messages"] = (*recipe.messages, turn(answer), turn(asked))
        return recipe.model_copy(update=changed)
    if recipe.completes:
        raise _no_conversation()
    ids = (*recipe.prompt_ids, *shared.ids, *reader.turn_ids(instruction))
    if len(ids) >= reader.context:
        raise TooLarge(
            f"{len(ids)} tokens of conversation leave no room in the context of {reader.context}",
            code="prompt_too_long",
            status=400,
            field="instruction",
            hint=f"at most {reader.context - 1} tokens; branch at an earlier index",
        )
    prompt_ids = packed_ids(ids)
    changed |= {"prompt_ids": prompt_ids, "prompt_sha256": prompt_hash(prompt_ids)}
    return _within_context(recipe.model_copy(update=changed), reader)


def _within_context(recipe: Recipe, reader: PromptReader) -> Recipe:
    room = reader.context - len(recipe.prompt_ids)
    return recipe.model_copy(update={"max_tokens": min(recipe.max_tokens, room)})


def _no_conversation() -> TailraceError:
    return Conflict(
        "the stream continues a prompt, so no message can follow it",
        code="unsupported",
        field="instruction",
        hint="branch a stream that was begun with messages, or give text",
    )


def _belongs_to_parent(field: str) -> CallerError:
    return CallerError(
        "cannot be changed: a branch takes this field from its parent stream",
        field=field,
        hint="leave the field out, or begin a new stream",
    )


def _cannot(why: str) -> Conflict:
    return Conflict(
        f"the model {why}",
        code="cannot_branch",
        field="index",
        hint="branch at index 0, or begin a new stream",
    )
