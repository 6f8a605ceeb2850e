"""Requests that are admitted or refused, and the recipes that they get."""

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import CallerError, Conflict, ModelError, NotFound
from tailrace.ledger.frame import (
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Priority,
    Sampling,
    ToolChoice,
    Tools,
)
from tailrace.origin.checkpoint.prompt import PromptReader
from tailrace.origin.generations.admission import DEFAULT_MAX_TOKENS, admit, request_hash
from tailrace.origin.generations.recipe import Recipe, prompt_hash
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_checkpoint(tmp_path_factory.mktemp("model"), Shape(context=CONTEXT))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def reader(directory: Path) -> PromptReader:
    return PromptReader(directory)


def sampled(**said: Any) -> Open:
    return Open(model="demo", prompt="x", sampling=Sampling(**said))


def admitted(reader: PromptReader, request: Open) -> Recipe:
    return admit(request, model="demo", fingerprint="f", reader=reader, draw_seed=lambda: 4711)


def test_what_a_request_leaves_open_is_settled_at_admission(reader: PromptReader) -> None:
    recipe = admitted(reader, Open(model="demo", prompt="The fox", max_tokens=5))
    assert recipe.sampling == Sampling(1, 0, 1, 0, 1, 0, 0, 4711)
    assert recipe.max_tokens == 5
    assert recipe.prompt_sha256 == prompt_hash(recipe.prompt_ids)


def with_defaults(directory: Path, copy: Path, **defaults: object) -> PromptReader:
    for name in ("config.json", "tokenizer.json"):
        (copy / name).write_bytes((directory / name).read_bytes())
    (copy / "generation_config.json").write_text(json.dumps(defaults))
    return PromptReader(copy)


def test_what_a_request_leaves_open_is_what_the_model_is_generated_with(
    directory: Path, tmp_path: Path
) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    more = {"min_p": 0.05, "repetition_penalty": 1.1}
    reader = with_defaults(directory, tmp_path, **defaults, **more, do_sample=True)
    recipe = admitted(reader, Open(model="demo", prompt="The fox"))
    assert recipe.sampling == Sampling(0.6, 20, 0.95, 0.05, 1.1, 0, 0, 4711)
    said = Open(
        model="demo", prompt="The fox", sampling=Sampling(min_p=0.0, repetition_penalty=1.0)
    )
    recipe = admitted(reader, said)
    assert (recipe.sampling.min_p, recipe.sampling.repetition_penalty) == (0.0, 1.0)


def test_a_model_that_is_not_sampled_is_greedy_unless_a_request_says_otherwise(
    directory: Path, tmp_path: Path
) -> None:
    reader = with_defaults(directory, tmp_path, do_sample=False, temperature=0.6)
    assert admitted(reader, Open(model="demo", prompt="The fox")).sampling.temperature == 0.0
    warm = Open(model="demo", prompt="The fox", sampling=Sampling(temperature=0.6))
    assert admitted(reader, warm).sampling.temperature == 0.6


@pytest.mark.parametrize(
    ("key", "value"),
    [("do_sample", "no"), ("top_p", 1.5), ("min_p", 1.5), ("repetition_penalty", 0)],
)
def test_a_default_that_has_no_meaning_is_refused_with_its_file(
    directory: Path, tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        with_defaults(directory, tmp_path, **{key: value})
    assert caught.value.field == str(tmp_path / "generation_config.json")


def test_what_a_request_says_is_kept(reader: PromptReader) -> None:
    request = Open(
        model="demo",
        prompt="The fox",
        stop=("x", "y"),
        ignore_eos=True,
        priority=Priority.BATCH,
        sampling=Sampling(temperature=0.0, top_k=3, top_p=0.5, seed=2**64 - 1),
    )
    recipe = admitted(reader, request)
    assert recipe.sampling == Sampling(0.0, 3, 0.5, 0, 1, 0, 0, 2**64 - 1)
    assert recipe.stop == ("x", "y")
    assert (recipe.ignore_eos, recipe.priority) == (True, "batch")


def test_what_else_a_request_says_is_kept_too(reader: PromptReader) -> None:
    request = Open(
        model="demo",
        prompt="The fox",
        logprobs=20,
        format=OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}'),
        sampling=Sampling(
            min_p=0.1, repetition_penalty=1.1, presence_penalty=-2.0, frequency_penalty=2.0
        ),
    )
    recipe = admitted(reader, request)
    assert recipe.sampling == Sampling(1, 0, 1, 0.1, 1.1, -2.0, 2.0, 4711)
    assert recipe.logprobs == 20
    assert recipe.format is not None
    kind, source = recipe.format
    assert (kind, json.loads(source).pop("type")) == ("json-schema", "object")


@pytest.mark.parametrize(
    ("kind", "source"), [(FormatKind.REGEX, "["), (FormatKind.JSON_SCHEMA, "{"), (1, "x" * 70_000)]
)
def test_a_format_that_no_text_could_have_is_refused(
    reader: PromptReader, kind: FormatKind, source: str
) -> None:
    shape = OutputFormat(FormatKind(kind), source)
    with pytest.raises(CallerError) as error:
        admitted(reader, Open(model="demo", prompt="x", format=shape))
    assert (error.value.field or "").startswith("format")


# ---- conversations that are too long ----

SYSTEM = Message("system", "fox")


def turns(count: int) -> tuple[Message, ...]:
    """Return turns, the user's first, each with a number of its own."""
    return tuple(
        Message(("user", "assistant")[nth % 2], f"{nth} fox fox fox") for nth in range(count)
    )


def rendered(reader: PromptReader, *messages: Message) -> tuple[int, ...]:
    return reader.ids(None, messages)


def test_a_conversation_that_fits_loses_nothing(reader: PromptReader) -> None:
    request = Open(model="demo", messages=turns(3), overflow=Overflow.DROP_OLDEST)
    recipe = admitted(reader, request)
    assert recipe.notices == ()
    assert tuple(recipe.prompt_ids) == rendered(reader, *turns(3))


def test_a_conversation_that_is_too_long_is_refused_unless_it_may_be_cut(
    reader: PromptReader,
) -> None:
    with pytest.raises(CallerError) as error:
        admitted(reader, Open(model="demo", messages=turns(31)))
    assert error.value.code == "prompt_too_long"


@pytest.mark.parametrize("max_tokens", [None, 1, 10, 20])
def test_the_oldest_turns_are_dropped_until_there_is_room(
    reader: PromptReader, max_tokens: int | None
) -> None:
    messages = (SYSTEM, *turns(31))
    request = Open(
        model="demo", messages=messages, max_tokens=max_tokens, overflow=Overflow.DROP_OLDEST
    )
    recipe = admitted(reader, request)
    fitting = [
        first
        for first in range(1, len(messages), 2)  # where the user's turns are
        if len(rendered_or_more(reader, SYSTEM, *messages[first:])) + (max_tokens or 1) <= CONTEXT
    ]
    assert tuple(recipe.prompt_ids) == rendered(reader, SYSTEM, *messages[fitting[0] :])
    dropped = fitting[0] - 1
    [(code, message)] = recipe.notices
    assert (code, message) == (
        "truncated",
        f"{dropped} older messages were dropped to fit the context",
    )
    if max_tokens is not None:
        assert recipe.max_tokens == max_tokens


def rendered_or_more(reader: PromptReader, *messages: Message) -> tuple[int, ...]:
    try:
        return rendered(reader, *messages)
    except CallerError:
        return (0,) * (CONTEXT + 1)


def test_a_room_that_cannot_be_is_made_as_far_as_it_goes(reader: PromptReader) -> None:
    request = Open(
        model="demo",
        messages=(SYSTEM, *turns(9)),
        max_tokens=10_000,
        overflow=Overflow.DROP_OLDEST,
    )
    recipe = admitted(reader, request)
    assert tuple(recipe.prompt_ids) == rendered(reader, SYSTEM, turns(9)[-1])
    assert recipe.max_tokens == CONTEXT - len(recipe.prompt_ids)


def test_a_last_turn_that_is_too_long_by_itself_is_refused(reader: PromptReader) -> None:
    long = Message("user", "fox " * CONTEXT)
    request = Open(model="demo", messages=(*turns(2), long), overflow=Overflow.DROP_OLDEST)
    with pytest.raises(CallerError) as error:
        admitted(reader, request)
    assert error.value.code == "prompt_too_long"


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize("open_objects", [False, True])
def test_objects_that_list_properties_are_closed_unless_the_model_is_set_otherwise(
    reader: PromptReader, open_objects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "open_objects", open_objects)
    form = OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(CITY))
    functions = json.dumps([{"name": "weather", "parameters": CITY}])
    tools = Tools(functions, ToolChoice.REQUIRED)
    answer = admitted(reader, Open(model="demo", prompt="x", format=form))
    call = admitted(reader, Open(model="demo", messages=(Message("user", "x"),), tools=tools))
    assert answer.format is not None and call.tools is not None
    [function] = json.loads(call.tools.functions)
    for schema in (json.loads(answer.format[1]), function["parameters"]):
        assert schema["properties"] == CITY["properties"]
        assert schema.get("additionalProperties", True) is open_objects


CONVERSATION = (Message("user", "x"),)


@pytest.mark.parametrize("form", [None, OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(CITY))])
def test_a_model_that_calls_no_tools_by_itself_answers_in_text_and_says_so(
    reader: PromptReader, form: OutputFormat | None
) -> None:
    tools = Tools(json.dumps([{"name": "weather", "parameters": CITY}]))
    plain = admitted(reader, Open(model="demo", messages=CONVERSATION))
    recipe = admitted(reader, Open(model="demo", messages=CONVERSATION, tools=tools, format=form))
    assert recipe.tools is None and recipe.prompt_ids == plain.prompt_ids
    assert (recipe.format is None) is (form is None)
    [(code, message)] = recipe.notices
    assert code == "tools_unused" and "required" in message


def test_a_server_is_given_the_schema_of_the_request() -> None:
    form = OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(CITY))
    recipe = admit(
        Open(model="demo", prompt="x", format=form),
        model="demo",
        fingerprint="f",
        reader=None,
        offers=("format",),
        draw_seed=lambda: 4711,
    )
    assert recipe.format == ("json-schema", json.dumps(CITY))


# ---- workers that answer in text ----


def asked(request: Open) -> Recipe:
    return admit(request, model="demo", fingerprint="f", reader=None, draw_seed=lambda: 4711)


def test_a_text_worker_is_given_the_text(reader: PromptReader) -> None:
    assert asked(Open(model="demo", prompt="The fox")).prompt == "The fox"
    chat = asked(Open(model="demo", messages=(Message("user", "Hi"), Message("wizard", "x"))))
    assert (chat.prompt, chat.messages) == (None, (("user", "Hi"), ("wizard", "x")))
    assert tuple(chat.prompt_ids) == ()


def test_a_text_worker_is_told_the_penalties() -> None:
    request = sampled(min_p=0.1, repetition_penalty=1.1, presence_penalty=1.5)
    recipe = asked(request)
    assert recipe.sampling == Sampling(1.0, 0, 1.0, 0.1, 1.1, 1.5, 0, 4711)


def test_a_text_worker_is_told_which_settings_the_request_gave() -> None:
    assert asked(sampled()).given == ()
    some = sampled(temperature=1.0, top_k=0, seed=3)
    assert asked(some).given == ("temperature", "top_k", "seed")
    again = Recipe.model_validate_json(asked(some).model_dump_json())
    assert again.given == ("temperature", "top_k", "seed")


@pytest.mark.parametrize(
    "request_",
    [
        Open(model="demo", prompt="x", logprobs=0),
        Open(model="demo", prompt="x", format=OutputFormat(FormatKind.REGEX, "a")),
        Open(model="demo", prompt="x", overflow=Overflow.DROP_OLDEST),
    ],
)
def test_a_text_worker_is_not_asked_for_what_only_an_engine_does(request_: Open) -> None:
    with pytest.raises(Conflict) as error:
        asked(request_)
    assert error.value.code == "unsupported"
    assert error.value.field in Open.__match_args__


def test_a_recipe_survives_the_ledger(reader: PromptReader) -> None:
    recipe = admitted(
        reader, Open(model="demo", prompt="Füchse 🦊", sampling=Sampling(seed=2**64 - 1))
    )
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_tokens_end_where_the_context_ends(reader: PromptReader) -> None:
    recipe = admitted(reader, Open(model="demo", prompt="The fox", max_tokens=10_000))
    assert recipe.max_tokens == CONTEXT - len(recipe.prompt_ids) < DEFAULT_MAX_TOKENS


def test_messages_go_through_the_chat_template(reader: PromptReader) -> None:
    chat = admitted(reader, Open(model="demo", messages=(Message("user", "The fox"),)))
    same = admitted(reader, Open(model="demo", prompt="<user>The fox<assistant>"))
    assert chat.prompt_ids == same.prompt_ids


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Open(model="demo"), "prompt"),
        (Open(model="demo", prompt="x", messages=(Message("user", "x"),)), "prompt"),
        (Open(model="demo", prompt=""), "prompt"),
        (Open(model="demo", prompt="x" * 50_000), "prompt"),
        (Open(model="demo", prompt="fox " * CONTEXT), "prompt"),
        (Open(model="demo", messages=(Message("wizard", "x"),)), "messages[0].role"),
        (Open(model="demo", prompt="x", max_tokens=0), "max_tokens"),
        (sampled(temperature=2.5), "temperature"),
        (sampled(temperature=float("nan")), "temperature"),
        (sampled(top_p=0.0), "top_p"),
        (sampled(top_p=float("inf")), "top_p"),
        (sampled(top_k=2**40), "top_k"),
        (sampled(min_p=1.1), "min_p"),
        (sampled(min_p=-0.1), "min_p"),
        (sampled(repetition_penalty=0.0), "repetition_penalty"),
        (sampled(repetition_penalty=10.5), "repetition_penalty"),
        (sampled(presence_penalty=2.5), "presence_penalty"),
        (sampled(presence_penalty=float("nan")), "presence_penalty"),
        (sampled(frequency_penalty=-2.5), "frequency_penalty"),
        (sampled(frequency_penalty=float("inf")), "frequency_penalty"),
        (Open(model="demo", prompt="x", logprobs=21), "logprobs"),
        (Open(model="demo", prompt="x", stop=("a",) * 9), "stop"),
        (Open(model="demo", prompt="x", stop=("a", "")), "stop[1]"),
        (Open(model="demo", prompt="x", stop=("a" * 129,)), "stop[0]"),
        (Open(model="demo", prompt="x", idempotency_key=""), "idempotency_key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(
    reader: PromptReader, request_: Open, field: str
) -> None:
    with pytest.raises(CallerError) as error:
        admitted(reader, request_)
    assert error.value.field == field
    assert error.value.hint or field == "prompt"


def test_an_unknown_model_names_the_one_there_is(reader: PromptReader) -> None:
    with pytest.raises(NotFound, match="this origin serves 'demo'"):
        admitted(reader, Open(model="other", prompt="x"))


def test_the_credit_of_a_request_does_not_make_it_another() -> None:
    one, two = Open(model="demo", prompt="x", credit=1), Open(model="demo", prompt="x", credit=2)
    assert request_hash(one) == request_hash(two)
    assert request_hash(one) != request_hash(Open(model="demo", prompt="y", credit=1))


def test_a_template_cannot_reach_out_of_its_sandbox(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": evil}))
    request = Open(model="demo", messages=(Message("user", "x"),))
    with pytest.raises(CallerError, match="the chat template refuses"):
        admitted(PromptReader(tmp_path), request)


def test_a_model_without_a_template_takes_prompts_only(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    with pytest.raises(CallerError, match="no chat template"):
        admitted(PromptReader(tmp_path), Open(model="demo", messages=(Message("user", "x"),)))


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"max_position_embeddings": "big"}'])
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        PromptReader(tmp_path)
