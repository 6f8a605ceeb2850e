"""Pipelines in a settings file: what is refused, and with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import OriginConfig, PipelineConfig
from tailrace.origin.pipelines.speech import library
from tailrace.origin.pool.model_table import load_tables
from tailrace.origin.workers.program import TEXT, makes_tokens, program, settings_of

MODEL = '[models.small]\nproducer = "a:b"\n'


def pipeline(*stages: str, name: str = "safe") -> str:
    """Return the table of a pipeline."""
    return "".join(f"[[pipelines.{name}.stages]]\n{stage}\n" for stage in stages)


def written(folder: Path, text: str) -> Path:
    file = folder / "tailrace.toml"
    file.write_text(text)
    return file


ASKS = 'stage = "model"\nmodel = "small"'
ROUTES = 'stage = "route"\nmodel = "small"\nrules = [{model = "quick", max_chars = 9}]'
BLOCKS = 'stage = "blocklist"\nwords = ["x"]'


def test_a_pipeline_is_served_as_a_model(tmp_path: Path) -> None:
    tables = load_tables(written(tmp_path, MODEL + pipeline(BLOCKS, ASKS)))
    assert list(tables) == ["small", "safe"]
    origin = OriginConfig(text_streams=7, worker_silence_s=9, filter="a:b")
    config = tables["safe"].alone("safe", origin)
    assert (config.text_streams, config.worker_silence_s, config.filter) == (7, 9, None)
    assert isinstance(config, PipelineConfig)
    assert not makes_tokens(config)
    module, settings = program(config)
    assert module == TEXT
    again = settings_of(settings)
    assert isinstance(again, PipelineConfig)
    assert again.pipeline == config.pipeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MODEL + pipeline('stage = "blocklst"', ASKS),
            r"pipelines\.safe\.stages\[1\]\.stage: no stage has the name 'blocklst' \(did you mean"
            r" blocklist\?\)",
        ),
        (
            MODEL + pipeline('stage = "blocklist"\nwords = ["x"]\nacton = "end"', ASKS),
            r"pipelines\.safe\.stages\[1\]\.acton: unknown setting \(did you mean action\?\)",
        ),
        (
            MODEL + pipeline(BLOCKS),
            r"pipelines\.safe.*no stage is a model",
        ),
        (
            MODEL + pipeline('stage = "model"\nmodel = "large"'),
            r"pipelines\.safe\.stages\[1\]: no model has the name 'large' \(the models are"
            r" small, safe\)",
        ),
        (
            MODEL + pipeline(ROUTES.replace("quick", "large")),
            r"pipelines\.safe\.stages\[1\]: no model has the name 'large'",
        ),
        (
            MODEL + pipeline(ROUTES) + pipeline('stage = "model"\nmodel = "safe"', name="quick"),
            r"in a circle: safe -> quick -> safe",
        ),
        (
            MODEL + pipeline(ROUTES + "\noptional = true") + pipeline(ASKS, name="quick"),
            r"pipelines\.safe\.stages\[1\]\.optional: a model cannot be optional",
        ),
        (
            MODEL + pipeline(ASKS, name="small"),
            r"pipelines\.small: a model has the name 'small', too",
        ),
        (
            pipeline('stage = "model"\nmodel = "b"', name="a")
            + pipeline('stage = "model"\nmodel = "a"', name="b"),
            r"pipelines\.a: the pipelines ask each other in a circle: a -> b -> a",
        ),
        (
            MODEL + pipeline(BLOCKS, BLOCKS, ASKS),
            r"two stages have the name 'blocklist'",
        ),
        (
            MODEL + pipeline(ASKS + "\noptional = true"),
            r"pipelines\.safe\.stages\[1\]\.optional: a model cannot be optional",
        ),
        (
            MODEL + pipeline('stage = "tests.origin.pipelines.staged:run"', ASKS),
            r"tests\.origin\.pipelines\.staged:run is not a class of stages",
        ),
        (
            MODEL + pipeline('stage = "no.such:Stage"', ASKS),
            r"cannot import no\.such",
        ),
        (
            MODEL + "[pipelines.safe]\nstages = []\n",
            r"pipelines\.safe\.stages",
        ),
        (
            MODEL + "[pipelines]\nsafe = 1\n",
            r"pipelines\.safe",
        ),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tables(written(tmp_path, text))


def test_the_models_of_a_route_are_known(tmp_path: Path) -> None:
    text = MODEL + pipeline(ROUTES) + pipeline(ASKS, name="quick")
    assert list(load_tables(written(tmp_path, text))) == ["small", "safe", "quick"]


HEXES = 'stage = "tests.origin.pipelines.staged:Hex"'
SCATTERS = 'stage = "tests.origin.pipelines.staged:Scattered"'


def test_a_stage_that_works_on_input_needs_a_pipeline_with_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'needs the bytes of an input \(add input = "pcm"'):
        load_tables(written(tmp_path, pipeline(HEXES)))
    text = '[pipelines.safe]\ninput = "bytes"\nmax_input_mib = 2\n' + pipeline(HEXES)
    config = load_tables(written(tmp_path, text))["safe"].alone("safe", OriginConfig())
    assert isinstance(config, PipelineConfig)
    assert config.max_input_bytes == 2 << 20


@pytest.mark.parametrize("line", ['input = "wav"', "max_input_mib = 0", "input_wait_s = 0"])
def test_a_wrong_setting_of_the_input_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=line.partition(" ")[0]):
        load_tables(written(tmp_path, f"[pipelines.safe]\n{line}\n{pipeline(HEXES)}"))


def test_a_stage_without_repeatable_outputs_is_not_first_behind_an_input(tmp_path: Path) -> None:
    begins = '[pipelines.safe]\ninput = "bytes"\n'
    with pytest.raises(ConfigError, match="this stage is not deterministic"):
        load_tables(written(tmp_path, begins + pipeline(SCATTERS, HEXES)))
    assert "safe" in load_tables(written(tmp_path, begins + pipeline(HEXES, SCATTERS)))


DETECTS = 'stage = "voice-activity"'
HEARS = 'stage = "transcribe"\nwords = ["one", "two"]'
CAPTIONS = '[pipelines.safe]\ninput = "pcm"\n'


def test_a_pipeline_of_speech_needs_no_model(tmp_path: Path) -> None:
    others = ('stage = "punctuate"\noptional = true', 'stage = "debounce"\nms = 100')
    text = CAPTIONS + pipeline(DETECTS, HEARS, *others)
    assert list(load_tables(written(tmp_path, text))) == ["safe"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (pipeline(DETECTS, HEARS), r'needs the bytes of an input \(add input = "pcm"'),
        (CAPTIONS + pipeline(HEARS + "\noptional = true"), "a model cannot be optional"),
        (CAPTIONS + pipeline(DETECTS, HEARS + '\ngrammar = "no.jsgf"'), "words and grammar"),
        (CAPTIONS + pipeline(DETECTS, 'stage = "transcribe"\nwords = ["xyzzy"]'), "xyzzy"),
        (CAPTIONS + pipeline(DETECTS + "\nsilence_ms = 30", HEARS), "silence_ms"),
        (CAPTIONS + pipeline(DETECTS, HEARS, 'stage = "debounce"\nms = 20'), "ms"),
    ],
)
def test_a_pipeline_of_speech_that_cannot_work_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tables(written(tmp_path, text))


def test_stages_of_speech_name_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "NAME", "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match=r"install tailrace\[speech\]"):
        load_tables(written(tmp_path, CAPTIONS + pipeline(DETECTS, HEARS)))


def test_checking_a_pipeline_of_speech_does_not_import_the_library(tmp_path: Path) -> None:
    file = written(tmp_path, CAPTIONS + pipeline(DETECTS, HEARS))
    code = (
        "import sys; from pathlib import Path; from tailrace.origin.pool.model_table import"
        f" load_tables; load_tables(Path({str(file)!r})); print({library.NAME!r} in sys.modules)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert made.stdout == "False\n"


def test_a_class_of_ones_own_is_a_stage(tmp_path: Path) -> None:
    own = 'stage = "tests.origin.pipelines.staged:Shout"'
    tables = load_tables(written(tmp_path, MODEL + pipeline(ASKS, own)))
    assert "safe" in tables


def test_a_stage_that_answers_prompts_itself_needs_no_model(tmp_path: Path) -> None:
    own = pipeline('stage = "tests.origin.pipelines.staged:Words"')
    assert list(load_tables(written(tmp_path, own)))[-1] == "safe"
    with pytest.raises(ConfigError, match="no stage is a model"):
        load_tables(written(tmp_path, pipeline('stage = "tests.origin.pipelines.staged:Shout"')))
