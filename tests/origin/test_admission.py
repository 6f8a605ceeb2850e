import json
from pathlib import Path

import pytest

from ledger.errors import CallerError, ModelError, NotFound
from ledger.frame import Message, Open, Priority
from origin.admission import DEFAULT_MAX_TOKENS, admit, request_hash
from origin.prompt import PromptReader
from origin.recipe import Recipe, prompt_hash
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


def admitted(reader: PromptReader, request: Open) -> Recipe:
    return admit(request, model="demo", fingerprint="f", reader=reader, draw_seed=lambda: 4711)


def test_what_a_request_leaves_open_is_settled_at_admission(reader: PromptReader) -> None:
    recipe = admitted(reader, Open(model="demo", prompt="The fox", max_tokens=5))
    assert (recipe.seed, recipe.temperature, recipe.top_k, recipe.top_p) == (4711, 1.0, 0, 1.0)
    assert recipe.max_tokens == 5
    assert recipe.prompt_sha256 == prompt_hash(recipe.prompt_ids)


def test_what_a_request_says_is_kept(reader: PromptReader) -> None:
    request = Open(
        model="demo",
        prompt="The fox",
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        seed=2**64 - 1,
        stop=("x", "y"),
        ignore_eos=True,
        priority=Priority.BATCH,
    )
    recipe = admitted(reader, request)
    assert (recipe.temperature, recipe.top_k, recipe.top_p) == (0.0, 3, 0.5)
    assert (recipe.seed, recipe.stop) == (2**64 - 1, ("x", "y"))
    assert (recipe.ignore_eos, recipe.priority) == (True, "batch")


def test_a_recipe_survives_the_ledger(reader: PromptReader) -> None:
    recipe = admitted(reader, Open(model="demo", prompt="Füchse 🦊", seed=2**64 - 1))
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
        (Open(model="demo", prompt="x", temperature=2.5), "temperature"),
        (Open(model="demo", prompt="x", temperature=float("nan")), "temperature"),
        (Open(model="demo", prompt="x", top_p=0.0), "top_p"),
        (Open(model="demo", prompt="x", top_p=float("inf")), "top_p"),
        (Open(model="demo", prompt="x", top_k=2**40), "top_k"),
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
