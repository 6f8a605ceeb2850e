"""The recipe of a branch: what it has from its parent, what it changes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import CallerError, Conflict, Forbidden, TailraceError
from tailrace.ledger.frame import (
    Branch,
    Caller,
    Durability,
    FormatKind,
    Open,
    OutputFormat,
    Priority,
    Sampling,
    Token,
    encode,
)
from tailrace.ledger.interface import Record, StreamInfo
from tailrace.origin.checkpoint.prompt import PromptReader
from tailrace.origin.core.stream import Steering
from tailrace.origin.generations.admission import request_hash
from tailrace.origin.generations.branch import Parent, branch_recipe, check_branch, needs_log
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.generations.stream_log import History
from tests.origin.stage import RECIPE, A
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SEED = 99
PARENT = RECIPE.model_copy(
    update={
        "stop": ("END",),
        "logprobs": 2,
        "tenant": "acme",
        "note": "the parent's",
        "notices": (("loading", "wait"), ("truncated", "two")),
        "siblings": ("00" * 16,),
        "sampling": Sampling(temperature=0.5, top_k=7, top_p=1.0, seed=1),
    }
)
TEXT = PARENT.model_copy(
    update={
        "prompt_ids": packed_ids(()),
        "prompt_sha256": prompt_hash(()),
        "messages": (("user", "Hi"),),
        "given": ("temperature",),
        "logprobs": None,
    }
)
CALLER = Caller("acme", 255)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    made: Path = write_checkpoint(tmp_path_factory.mktemp("model"), Shape(context=CONTEXT))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return PromptReader(made)


@pytest.fixture(scope="module")
def plain_reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    return PromptReader(write_checkpoint(tmp_path_factory.mktemp("plain"), Shape(context=CONTEXT)))


def request(index: int = 3, **fields: Any) -> Open:
    point = {name: fields.pop(name) for name in ("text", "instruction") if name in fields}
    return Open("", branch=Branch(A, index, **point), caller=CALLER, **fields)


def parent_of(wanted: Open, recipe: Recipe = PARENT, count: int = 5) -> Parent:
    assert wanted.branch is not None
    info = StreamInfo(A, 1, count, False, Durability.PROCESS, recipe.model_dump_json(), 0)
    return Parent(info, recipe, wanted.branch)


def history(count: int, begin: int = 0) -> History:
    made = History(begin, begin=begin)
    for index in range(begin, begin + count):
        made.add(Record(encode(Token(f" {index}", index)), (index + 10,)))
    return made


def made(
    wanted: Open,
    reader: PromptReader | None,
    recipe: Recipe = PARENT,
    shared: History | None = None,
    offers: tuple[str, ...] = (),
) -> Recipe:
    parent = parent_of(wanted, recipe)
    check_branch(wanted, parent)
    found = shared or (history(wanted.branch.index) if wanted.branch else History())
    return branch_recipe(
        wanted,
        parent,
        found if needs_log(wanted, parent) else History(),
        reader=reader,
        fingerprint="now",
        offers=offers,
        draw_seed=lambda: SEED,
    )


def test_it_has_its_parents_settings_and_a_new_seed(reader: PromptReader) -> None:
    recipe = made(request(note="own", priority=Priority.BATCH), reader)
    assert recipe.sampling == Sampling(
        **{name: getattr(PARENT.sampling, name) for name in ("temperature", "top_k", "top_p")},
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        seed=SEED,
    )
    kept = ("model", "fingerprint", "prompt_ids", "max_tokens", "stop", "ignore_eos", "logprobs")
    assert all(getattr(recipe, name) == getattr(PARENT, name) for name in (*kept, "tenant"))
    assert (recipe.base, recipe.begin, recipe.siblings) == (3, 0, ())
    assert (recipe.note, recipe.priority) == ("own", "batch")
    assert recipe.notices == ()  # the shared frames have them
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_the_request_changes_what_it_names(reader: PromptReader) -> None:
    sampling = Sampling(temperature=1.5, seed=4)
    wanted = request(sampling=sampling, stop=("X",), max_tokens=20, logprobs=0, ignore_eos=True)
    recipe = made(wanted, reader)
    assert (recipe.sampling.temperature, recipe.sampling.seed) == (1.5, 4)
    assert recipe.sampling.top_k == 7
    assert (recipe.stop, recipe.max_tokens, recipe.logprobs) == (("X",), 20, 0)
    assert made(request(max_tokens=1 << 20), reader).max_tokens == CONTEXT - 2


def test_notices_that_the_shared_frames_lack_are_its_own(reader: PromptReader) -> None:
    recipe = made(request(1), reader)
    assert recipe.notices == (("truncated", "two"),)
    assert [(one.code, one.index) for one in recipe.first_notices(1)] == [("truncated", 1)]
    assert recipe.first_notices(2) == []


def test_a_text_is_inserted_once(reader: PromptReader) -> None:
    recipe = made(request(text="ab"), reader)
    ids = reader.steer_ids("ab")
    assert tuple(recipe.inserted_ids) == ids
    assert tuple(recipe.run(history(3)).inserted_ids) == ids
    assert tuple(recipe.run(history(4)).inserted_ids) == ()
    with pytest.raises(CallerError, match="tokens") as error:
        made(request(text="ab" * 20), reader)
    assert error.value.field == "text"


def test_steer_orders_are_not_taken_for_the_inserted_text() -> None:
    steering = Steering()
    steering.begin(0, inserts=True)
    steering.add((7, 8), ticket=1)
    assert steering.confirm(2) == []  # the text of the branch, which has as many tokens
    assert steering.confirm(2) == [1]
    steering = Steering()
    steering.begin(0, inserts=True)
    steering.add((7, 8), ticket=1)
    assert steering.begin(1) == []  # the next run finds the text of the branch in the log
    assert steering.begin(2) == [1]


def test_an_instruction_makes_the_shared_frames_a_part_of_the_prompt(
    reader: PromptReader,
) -> None:
    recipe = made(request(instruction="Go"), reader)
    turns = reader.turn_ids("Go")
    assert reader.text(turns) == "<user>Go<assistant>"
    assert tuple(recipe.prompt_ids) == (5, 6, 10, 11, 12, *turns)
    assert recipe.prompt_sha256 == prompt_hash(recipe.prompt_ids)
    assert (recipe.base, recipe.begin, recipe.fingerprint) == (3, 3, "now")
    run = recipe.run(history(2, begin=3))
    assert (tuple(run.generated_ids), run.next_index, run.sent_bytes) == ((13, 14), 5, 4)


def test_a_text_worker_gets_the_instruction_as_a_message() -> None:
    recipe = made(request(instruction="Go"), None, TEXT, offers=("branch",))
    assert recipe.messages == (("user", "Hi"), ("assistant", " 0 1 2"), ("user", "Go"))
    assert made(request(), None, TEXT, offers=("branch",)).messages == (("user", "Hi"),)
    with_top_k = request(sampling=Sampling(top_k=3))
    assert made(with_top_k, None, TEXT, offers=("branch",)).given == ("temperature", "top_k")
    assert made(request(0), None, TEXT).base == 0


@pytest.mark.parametrize(
    ("fields", "recipe", "error", "field", "message"),
    [
        ({"prompt": "x"}, PARENT, CallerError, "prompt", "a branch takes this field from"),
        (
            {"format": OutputFormat(FormatKind.REGEX, "a")},
            PARENT,
            CallerError,
            "format",
            "a branch",
        ),
        ({"model": "other"}, PARENT, CallerError, "model", "'other', but"),
        ({"text": "a", "instruction": "b"}, PARENT, CallerError, "instruction", "both"),
        ({"sampling": Sampling(temperature=3)}, PARENT, CallerError, "temperature", "is 3"),
        ({"max_tokens": 3}, PARENT, CallerError, "max_tokens", "have 3 tokens already"),
        ({"text": ""}, PARENT, CallerError, "text", "is empty"),
        ({"instruction": ""}, PARENT, CallerError, "instruction", "is empty"),
        (
            {"text": "a"},
            PARENT.model_copy(update={"format": ("regex", "a")}),
            Conflict,
            "text",
            "output format",
        ),
        (
            {"instruction": "a"},
            PARENT.model_copy(update={"completes": True}),
            Conflict,
            "instruction",
            "continues a prompt",
        ),
        ({}, PARENT.model_copy(update={"begin": 4}), Conflict, "index", "before index 4"),
        ({}, TEXT, Conflict, "index", "workers of another kind"),
        ({"caller": Caller("other", 255)}, PARENT, Forbidden, "id", "another tenant"),
        ({"caller": None}, PARENT, Forbidden, "id", "another tenant"),
    ],
)
def test_what_is_refused(
    reader: PromptReader,
    fields: dict[str, Any],
    recipe: Recipe,
    error: type[TailraceError],
    field: str,
    message: str,
) -> None:
    wanted = request(**{name: fields[name] for name in fields if name in ("text", "instruction")})
    others = {name: fields[name] for name in fields if name not in ("text", "instruction")}
    with pytest.raises(error, match=message) as refused:
        made(replace(wanted, **others), reader, recipe)
    assert refused.value.field == field


def test_a_worker_that_cannot_continue_a_text_is_named() -> None:
    with pytest.raises(Conflict, match="cannot continue an answer") as error:
        made(request(), None, TEXT)
    assert error.value.code == "cannot_branch"


def test_a_model_without_a_template_takes_no_instruction(plain_reader: PromptReader) -> None:
    with pytest.raises(Conflict, match="no chat template") as error:
        made(request(instruction="Go"), plain_reader)
    assert (error.value.code, error.value.field) == ("unsupported", "instruction")


def test_a_repeated_request_may_have_another_token() -> None:
    wanted = request()
    assert wanted.branch is not None
    other = replace(wanted, branch=replace(wanted.branch, token="v1.a.b.c"))
    assert request_hash(other) == request_hash(wanted)
    moved = replace(wanted, branch=replace(wanted.branch, index=4))
    assert request_hash(moved) != request_hash(wanted)
