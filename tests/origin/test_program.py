"""Which program a slot runs, and that it understands its own command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ledger.errors import ConfigError
from origin.config import OriginConfig
from origin.producers.text_program import open_producer, text_parser
from origin.program import makes_tokens, program

pytestmark = pytest.mark.anyio
URL = "https://there.example/v1"


def parsed(**settings: Any) -> Any:
    module, *flags = program(OriginConfig.load(**settings))
    assert module == "origin.producers.text_worker"
    return text_parser().parse_args([*flags, "--socket", "s"])


def test_a_checkpoint_of_a_decoder_runs_our_own() -> None:
    config = OriginConfig()
    assert makes_tokens(config)
    module, *flags = program(config)
    assert module == "origin.engine.worker"
    assert {f"--model={config.model}", "--name=demo", "--device=auto"} <= set(flags)


def test_what_is_said_about_an_upstream_server_reaches_the_worker() -> None:
    options = parsed(
        upstream=URL,
        upstream_model="-m",
        upstream_key_env="KEY",
        upstream_lost="end",
        upstream_first_token_s=7,
        text_streams=3,
    )
    assert (options.upstream, options.upstream_model, options.streams) == (URL, "-m", 3)
    assert (options.upstream_key_env, options.upstream_lost) == ("KEY", "end")
    assert (options.upstream_first_token_s, options.upstream_between_tokens_s) == (7.0, 30.0)


def test_a_filter_is_for_every_kind_of_worker() -> None:
    assert parsed(producer="a.b:c", filter="a.b:d").filter == "a.b:d"
    assert parsed(upstream=URL).filter is None


def test_the_name_is_the_producers_unless_one_is_given() -> None:
    assert parsed(producer="a.b:c").name is None
    assert parsed(producer="a.b:c", model_name="mine").name == "mine"


async def test_a_key_that_is_not_in_the_environment_is_named() -> None:
    options = parsed(upstream=URL, upstream_key_env="TAILRACE_NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="TAILRACE_NO_SUCH_KEY is not set"):
        await open_producer(options, lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"producer": "a b"}, "origin.producer: write module:factory"),
        ({"producer": "a.b"}, "origin.producer: write module:factory"),
        ({"upstream": "there:80/v1"}, "origin: upstream: write http://HOST:PORT/v1"),
        ({"upstream": "http://[/v1"}, "origin: upstream: write http://HOST:PORT/v1"),
        ({"upstream": URL, "producer": "a:b"}, "give producer or upstream, not both"),
        ({"upstream_lost": "shrug"}, "origin.upstream_lost"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OriginConfig.load(**settings)
    assert message in str(caught.value)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        OriginConfig.load(upstream="https://user:hunter2@there.example/v1")
    assert "hunter2" not in str(caught.value)


def test_a_checkpoint_is_called_as_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-tiny"
    folder.mkdir()
    assert "--name=Llama-tiny" in program(OriginConfig(model=folder))
    assert "--name=mine" in program(OriginConfig(model=folder, model_name="mine"))


def test_what_is_said_about_the_engine_reaches_the_worker(tmp_path: Path) -> None:
    flags = program(
        OriginConfig(
            step_ms=20, running_streams=3, kv_mib=64, filter="a.b:c", speculate="prompt-lookup"
        )
    )
    assert {"--step-ms=20.0", "--running=3", "--kv-mib=64", "--filter=a.b:c"} <= set(flags)
    assert "--prompt-lookup" in flags
    flags = program(OriginConfig(draft_model=tmp_path, speculate="prompt-lookup"))
    assert f"--draft-model={tmp_path.resolve()}" in flags
    assert "--prompt-lookup" not in flags
