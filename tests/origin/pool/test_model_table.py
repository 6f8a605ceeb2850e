"""`[models.NAME]`: what may be said of several models, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import DEMO_MODEL, OriginConfig
from tailrace.origin.pool.model_table import ModelTable, chosen, load_tables
from tailrace.origin.serving.plan import KV_MIB, MIB, needed


def written(folder: Path, text: str) -> Path:
    file = folder / "tailrace.toml"
    file.write_text(text)
    return file


def alone(file: Path) -> list[OriginConfig]:
    """Return the settings of each of its models."""
    return [table.alone(name, OriginConfig()) for name, table in load_tables(file).items()]


def test_a_model_has_the_settings_of_an_origin_of_its_own(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[origin]\ndevice = "cpu"\nworkers = 1\nkv_mib = 64\n'
        f'[models.small]\nfolder = "{DEMO_MODEL}"\nminimum_warm = 2\n'
        '[models.away]\nupstream = "http://there.example/v1"\nkv_mib = 8\n',
    )
    origin = OriginConfig.load(file)
    served = chosen(load_tables(file), (), origin)
    small, away = (table.alone(name, origin) for name, table in served.items())
    assert (small.model, small.served_name, small.workers) == (DEMO_MODEL, "small", 2)
    assert (small.device, small.kv_mib, small.upstream) == ("cpu", 64, None)
    assert (away.upstream, away.model_name, away.kv_mib) == ("http://there.example/v1", "away", 8)


def test_those_that_are_named_are_served_and_a_folder_has_its_own_name(tmp_path: Path) -> None:
    tables = {"a": ModelTable(folder=tmp_path), "b": ModelTable(producer="c:d")}
    origin = OriginConfig()
    assert chosen(tables, (), origin) == tables
    assert chosen({}, (), origin) == {}
    other = tmp_path / "other"
    assert chosen(tables, ("b", str(other)), origin) == {
        "b": tables["b"],
        "other": ModelTable(folder=other),
    }


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("[models.a]\npin = true\n", "models.a", "set exactly one of folder, producer, upstream"),
        ('[models.a]\nfolder = "x"\nproducer = "y:z"\n', "models.a", "not folder and producer"),
        ('[models.a]\nfolder = "x"\nminimal_warm = 1\n', "models.a.minimal_warm", "unknown"),
        ('[models.a]\nfolder = "x"\nworkers = 0\n', "models.a.workers", "greater than or equal"),
        ('[models]\na = "x"\n', "models.a", "is not a table"),
        ('[models.a]\nfolder = "x"\n[models.a]\nfolder = "y"\n', "", "models"),
        ('[models.a]\nproducer = "no place"\n', "models.a.producer", "write module:factory"),
        ('[models.a]\nupstream = "nowhere"\n', "models.a", "write http://HOST:PORT/v1"),
    ],
)
def test_a_table_that_cannot_be_is_named(
    tmp_path: Path, text: str, field: str, message: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        alone(file)
    assert (caught.value.field or "") == field
    assert "did you mean minimum_warm?" in str(caught.value) or "minimal" not in text


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models have the name 'model'"):
        chosen({}, ("a/model", "b/model"), OriginConfig())


@pytest.mark.parametrize(
    ("origin", "models"),
    [
        ({"model": Path("x")}, ()),
        ({"producer": "y:z"}, ()),
        ({"producer": "y:z"}, ("a", "b")),
    ],
)
def test_what_is_served_is_said_once(origin: dict[str, Any], models: tuple[str, ...]) -> None:
    config = OriginConfig.load(**origin)
    with pytest.raises(ConfigError, match="select what is served") as caught:
        chosen({"a": ModelTable(folder=Path("a"))}, models, config)
    assert caught.value.field == f"origin.{next(iter(origin))}"


def test_a_worker_needs_its_weights_and_a_cache_that_fits_in_what_is_left() -> None:
    origin = OriginConfig(device="cpu")
    plain = ModelTable(folder=DEMO_MODEL)
    size, settings = needed("m", plain, plain.alone("m", origin))
    weights = size - KV_MIB["cpu"] * MIB
    assert 0 < weights < 16 * MIB
    assert settings.kv_mib == KV_MIB["cpu"]
    capped = ModelTable(folder=DEMO_MODEL, memory_mib=50)
    size, settings = needed("m", capped, capped.alone("m", origin))
    assert size == 50 * MIB
    assert settings.kv_mib == 50 - -(-weights // MIB)
    for table in (
        ModelTable(folder=DEMO_MODEL, memory_mib=weights // MIB),
        ModelTable(folder=DEMO_MODEL, memory_mib=50, kv_mib=50),
    ):
        with pytest.raises(ConfigError, match="weights and KV cache take") as caught:
            needed("m", table, table.alone("m", origin))
        assert caught.value.field == "models.m.memory_mib"
    assert needed("m", ModelTable(producer="a:b", memory_mib=7), OriginConfig(producer="a:b")) == (
        7 * MIB,
        OriginConfig(producer="a:b"),
    )
