"""Which program a slot runs, and that what is said about it reaches the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import OriginConfig, PipelineConfig
from tailrace.origin.workers.program import makes_tokens, program
from tailrace.origin.workers.text_worker import open_producer

pytestmark = pytest.mark.anyio
URL = "https://there.example/v1"


def read(config: OriginConfig) -> tuple[str, OriginConfig]:
    """Return the module, and what it reads."""
    module, settings = program(config)
    return module, OriginConfig.model_validate_json(settings)


def test_a_checkpoint_of_a_decoder_runs_our_own(tmp_path: Path) -> None:
    config = OriginConfig(
        step_ms=20, kv_mib=64, filter="a.b:c", speculate="prompt-lookup", draft_model=tmp_path
    )
    assert makes_tokens(config)
    module, said = read(config)
    assert module == "tailrace.origin.workers.token_worker"
    assert said == config.model_copy(
        update={
            "model": config.model.resolve(),
            "model_name": "demo",
            "draft_model": tmp_path.resolve(),
        }
    )


def test_what_is_said_about_an_upstream_server_reaches_the_worker() -> None:
    config = OriginConfig(
        upstream=URL, upstream_model="-m", upstream_key_env="KEY", upstream_first_token_s=7
    )
    module, said = read(config)
    assert module == "tailrace.origin.workers.text_worker"
    assert said == config.model_copy(update={"model": config.model.resolve()})


def test_what_the_origin_was_told_counts_and_not_the_environment_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, settings = program(OriginConfig(producer="a.b:c"))
    monkeypatch.setenv("TAILRACE_ORIGIN_TEXT_STREAMS", "3")
    monkeypatch.setenv("TAILRACE_ORIGIN_FILTER", "d.e:f")
    said = OriginConfig.model_validate_json(settings)
    assert (said.text_streams, said.filter) == (64, None)


def test_the_name_is_the_producers_unless_one_is_given() -> None:
    assert read(OriginConfig(producer="a.b:c"))[1].model_name is None
    assert read(OriginConfig(producer="a.b:c", model_name="mine"))[1].model_name == "mine"


async def test_a_key_that_is_not_in_the_environment_is_named() -> None:
    config = OriginConfig(upstream=URL, upstream_key_env="TAILRACE_NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="TAILRACE_NO_SUCH_KEY is not set"):
        await open_producer(config, lambda *_: None)


async def test_a_stage_that_cannot_load_keeps_the_worker_from_starting(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [
        {"stage": "tests.origin.pipelines.staged:Words"},
        {
            "stage": "tests.origin.pipelines.staged:Scale",
            "name": "sums",
            "notes": str(tmp_path / "loads"),
            "fails": True,
        },
    ]
    config = PipelineConfig(
        pipeline={"stages": stages},
        model_name="safe",
        device="cpu",
        socket=tmp_path / "socket",
    )
    reported: list[str] = []
    message = "pipelines.safe: the stage sums of safe cannot load: RuntimeError: the weights are"
    with pytest.raises(ConfigError, match=message):
        await open_producer(config, lambda stage, done, total: reported.append(stage))
    assert reported == ["loading the stage sums"]
    stages[1]["fails"] = False
    producer = await open_producer(config, lambda *_: None)
    assert producer.about.device == "cpu"
    await producer.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"producer": "a b"}, "(write module:factory, such as"),
        ({"producer": "a.b"}, "(write module:factory, such as"),
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
    assert read(OriginConfig(model=folder))[1].model_name == "Llama-tiny"
    assert read(OriginConfig(model=folder, model_name="mine"))[1].model_name == "mine"
