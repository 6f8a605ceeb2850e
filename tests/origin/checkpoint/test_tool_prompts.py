"""Tools, calls and their answers on their way into a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Message, Open, OutputFormat, ToolChoice, Tools
from tailrace.ledger.wire.words import FormatKind
from tailrace.origin.checkpoint.prompt import PromptReader
from tailrace.origin.generations.admission import ALL_THERE_IS, admit
from tailrace.origin.generations.recipe import Recipe
from tests.origin.tiny_checkpoint import END, END_ID, Shape, train_tokenizer, write_checkpoint

# The form of Qwen's template.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}</tools>"
    "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'tool' %}<tool_response>{{ m.name }}={{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endif %}'
    + END
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"
UNKNOWN = (
    "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
ADD = {"name": "add", "description": f"Adds.{END}", "parameters": {"type": "object"}}
TURNS = (
    Message("user", "1 + 1?"),
    Message("assistant", "", '[{"id":"c1","name":"add","arguments":"{\\"a\\": \\"é\\"}"}]'),
    Message("tool", "2", tool_call_id="c1"),
)


def tokenizer() -> Tokenizer:
    made = train_tokenizer(300)
    made.add_special_tokens(
        [AddedToken(f"<|{role}|>", special=True) for role in ("user", "assistant", "tool")]
    )
    return made


TOKENIZER = tokenizer()


def reader_of(folder: Path, template: str) -> PromptReader:
    write_checkpoint(folder, Shape(vocab=310, layers=1, context=1024))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return PromptReader(folder)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    return reader_of(tmp_path_factory.mktemp("tools"), TEMPLATE)


def admitted(reader: PromptReader, request: Open) -> Recipe:
    return admit(request, model="demo", fingerprint="f", reader=reader, draw_seed=lambda: 1)


def asking(tools: Tools | None = None, turns: tuple[Message, ...] = TURNS) -> Open:
    return Open(model="demo", messages=turns, tools=tools)


def test_a_template_gets_tools_calls_as_objects_and_the_names_of_answers(
    reader: PromptReader,
) -> None:
    recipe = admitted(reader, asking(Tools(json.dumps([ADD]))))
    ids = list(recipe.prompt_ids)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == (
        '<tools>{"type": "function", "function": '
        + json.dumps(ADD)
        + f"}}</tools><|user|>1 + 1?{END}"
        + '<|assistant|><tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'
        + f"{END}<|tool|><tool_response>add=2</tool_response>{END}<|assistant|>"
    )
    # The one in the description is read as plain characters.
    assert ids.count(END_ID) == 3
    assert recipe.tools is not None and recipe.tools.markup == "hermes"


def test_tools_that_may_not_be_called_are_not_shown(reader: PromptReader) -> None:
    plain = admitted(reader, asking())
    assert admitted(reader, asking(Tools(json.dumps([ADD]), ToolChoice.NONE))) == plain
    assert plain.tools is None


def test_a_schema_for_the_answer_goes_with_tools_and_says_nothing_where_one_must_be_called(
    reader: PromptReader,
) -> None:
    schema = OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}')
    either = admitted(reader, replace(asking(Tools(json.dumps([ADD]))), format=schema))
    assert either.format is not None and either.format[0] == schema.kind.word
    assert either.tools is not None
    forced = asking(Tools(json.dumps([ADD]), ToolChoice.REQUIRED))
    assert admitted(reader, replace(forced, format=schema)) == admitted(reader, forced)
    bad = json.dumps([{"name": "bad", "parameters": {"type": "wizard"}}])
    with pytest.raises(CallerError) as caught:
        admitted(reader, replace(asking(Tools(bad)), format=schema))
    assert caught.value.field == "tools[0].parameters"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (asking(Tools("{}")), "tools"),
        (asking(Tools("[]")), "tools"),
        (asking(Tools('[{"name":1}]')), "tools[0]"),
        (asking(Tools('[{"name":"a","parameters":[]}]')), "tools[0].parameters"),
        (asking(Tools(json.dumps([ADD]), ToolChoice.REQUIRED, "sub")), "tools"),
        (asking(turns=(Message("assistant", "", "[1]"),)), "messages[0].tool_calls[0]"),
        (Open(model="demo", prompt="x", tools=Tools(json.dumps([ADD]))), "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    reader: PromptReader, request_: Open, field: str
) -> None:
    with pytest.raises(CallerError) as caught:
        admitted(reader, request_)
    assert caught.value.field == field


@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_a_model_that_calls_in_an_unknown_form_is_refused(
    tmp_path: Path, choice: ToolChoice
) -> None:
    reader = reader_of(tmp_path, UNKNOWN)
    with pytest.raises(CallerError, match="an unknown markup") as caught:
        admitted(reader, asking(Tools(json.dumps([ADD]), choice), (Message("user", "1 + 1?"),)))
    assert (caught.value.code, caught.value.field) == ("unsupported", "tools")


def test_a_model_without_a_form_of_its_own_calls_only_where_it_must(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, NO_TOOLS)
    turns = (Message("user", "1 + 1?"),)
    left = admitted(reader, asking(Tools(json.dumps([ADD])), turns))
    assert left.tools is None and [code for code, _ in left.notices] == ["tools_unused"]
    forced = admitted(reader, asking(Tools(json.dumps([ADD]), ToolChoice.REQUIRED), turns))
    assert forced.tools is not None and forced.tools.markup == "hermes"
    assert forced.notices == ()


def test_who_asks_for_all_that_there_is_room_for_gets_what_the_context_leaves(
    reader: PromptReader,
) -> None:
    recipe = admitted(reader, Open(model="demo", messages=TURNS, max_tokens=ALL_THERE_IS))
    assert recipe.max_tokens == 1024 - len(recipe.prompt_ids)
