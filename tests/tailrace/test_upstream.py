"""`tailrace up --upstream`: what is served of a server, and what a wrong flag is answered."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.upstream import MAX_MODELS, UpstreamServer, choose, find_upstream

URL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    ("listed", "wanted", "served"),
    [
        (["a"], [], ("a",)),
        (["a", "org/b:3b"], [], ("a", "org/b:3b")),
        (["a", "org/b:3b"], ["org/b:3b"], ("org/b:3b",)),
        (["a", "b"], ["b", "a", "b"], ("b", "a")),
        (None, ["hidden"], ("hidden",)),
        ([], ["hidden"], ("hidden",)),
    ],
)
def test_the_models_that_are_named_are_served_or_else_all_that_are_listed(
    listed: list[str] | None, wanted: list[str], served: tuple[str, ...]
) -> None:
    assert choose(URL, listed, wanted) == served


@pytest.mark.parametrize(
    ("listed", "wanted", "says"),
    [
        (["qwen3", "llama"], ["qwen"], "has no model 'qwen' (did you mean qwen3? it lists"),
        (["a"], ["zzz"], "has no model 'zzz' (it lists a)"),
        (None, [], "lists no models (name the model to serve: --model NAME)"),
        (
            [f"m{n}" for n in range(MAX_MODELS + 1)],
            [],
            "name the models to serve: --model m0 --model",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_says_what_to_type(
    listed: list[str] | None, wanted: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(URL, listed, wanted)
    assert says in str(caught.value)


def test_several_models_are_a_file_of_tables_that_names_the_key_and_not_its_value(
    tmp_path: Path,
) -> None:
    server = UpstreamServer(URL, "THE_KEY", ("a", 'odd "name"\\'))
    flags = server.origin_flags(tmp_path)
    tables = tomllib.loads(Path(str(flags["--config"])).read_text())["models"]
    assert list(tables) == ["a", 'odd "name"\\']
    assert tables["a"] == {
        "upstream": URL,
        "upstream_model": "a",
        "pin": True,
        "upstream_key_env": "THE_KEY",
    }


def test_one_model_is_flags(tmp_path: Path) -> None:
    flags = UpstreamServer(URL, "THE_KEY", ("a",)).origin_flags(tmp_path)
    assert flags == {
        "--upstream": URL,
        "--upstream-model": "a",
        "--upstream-key-env": "THE_KEY",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("url", "variable", "says"),
    [
        ("localhost:8000", None, "is not an http:// or https:// URL"),
        ("http://:8000/v1", None, "is not an http:// or https:// URL"),
        ("http://me:secret@host/v1", None, "the URL contains a password"),
        ("http://127.0.0.1:1/v1", "NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is not set"),
        ("http://127.0.0.1:1/v1", None, "no OpenAI-compatible server answers at"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_refused_with_the_flag(
    url: str, variable: str | None, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await find_upstream(url, variable, ())
    assert says in str(caught.value) and "secret" not in str(caught.value)
    assert str(caught.value).startswith(("--upstream: ", "--api-key-env: "))
