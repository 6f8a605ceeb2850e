"""`tailrace model`: look at a checkpoint before it is served.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.commands.options import JsonOption, command_group, extra
from tailrace.ledger.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.origin.checkpoint.finding import Finding
    from tailrace.origin.checkpoint.model_check import ModelReport

# Options of all commands that load a model or compute how much memory it needs.
WeightsOption = Annotated[
    str | None, typer.Option(metavar="auto|int8|int4", help="Number format of the layers' weights.")
]
KvCacheOption = Annotated[
    str | None, typer.Option(metavar="auto|int8|fp8", help="Number format of keys and values.")
]
HeadOption = Annotated[
    str | None, typer.Option(metavar="auto|int8", help="Number format of the LM head.")
]
EXIT_NOT_SUPPORTED = 1
MAX_SHOWN_FINDINGS = 20
"""Maximum number of findings that are shown as text, because one wrong size in a model's
config.json makes every tensor wrong. The JSON output has all findings."""

model_app = command_group("Check a checkpoint before it is served.")


@model_app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Print how many full contexts fit into this much memory, such as 24GiB.",
        ),
    ] = None,
    weights: WeightsOption = None,
    kv_cache: KvCacheOption = None,
    head: HeadOption = None,
    values: Annotated[
        bool,
        typer.Option(
            "--values", help="Also read every weight: find NaN and invalid ternary codes."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check if a checkpoint can be served, and how much memory it needs.

    DIR has config.json, tokenizer.json and model.safetensors (or shards and their index), as
    `hf download NAME --local-dir DIR` writes them. Only the headers of the weights are read, unless
    --values is given. Number formats that are not given come from the settings of `[origin]`.
    The exit status is 0 if the model can be served, and 1 if not.
    """
    memory_bytes = None if memory is None else _bytes(memory)
    with extra("torch"):
        from tailrace.origin.checkpoint.folder import check_folder

        check_folder(directory)
        from tailrace.origin.checkpoint.model_check import check_model
        from tailrace.origin.config import OriginConfig

        settings = OriginConfig.load(weights=weights, kv_cache=kv_cache, head=head)
        report = check_model(directory, settings.formats)
        if values and report.supported and report.config is not None:
            from tailrace.origin.models.tensors import examine_values

            report.findings.extend(examine_values(directory, report.config))
    if as_json:
        typer.echo(json.dumps(_document(report, memory_bytes), ensure_ascii=False, indent=2))
    else:
        _show(report, memory_bytes)
    if not report.supported:
        raise typer.Exit(EXIT_NOT_SUPPORTED)


@model_app.command("load-profile")
def load_profile(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Checkpoint folder. Default: the setting origin.model."
        ),
    ] = None,
    starts: Annotated[int, typer.Option(min=1, max=100, help="Number of cold starts.")] = 5,
    chart: Annotated[Path | None, typer.Option(help="Also draw a chart: .svg or .png.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure each stage of a worker's cold start.

    Starts a worker several times with the settings of `[origin]`. Prints how long each stage took,
    and its floor, the shortest time that it took in any start. A running origin is not touched, but
    the extra worker takes memory and processor time.
    """
    import asyncio

    with extra("torch"):
        from tailrace.ledger.process.logging_setup import configure_logging
        from tailrace.origin.config import OriginConfig
        from tailrace.origin.workers.load_profile import profile

        configure_logging("error")
        found = asyncio.run(profile(OriginConfig.load(model=directory), starts))
    stages = [
        (stage.name, stage.ms, found.floors_s[stage.name] * 1e3, stage.size)
        for stage in found.cold.stages
    ]
    if chart is not None:
        with extra("plots"):
            from tailrace.origin.pool.policies.charts import draw_waterfall
        draw_waterfall(chart, [stage[:3] for stage in stages])
    warm_ms = sorted((start.ready_s - start.asked_s) * 1e3 for start in found.warm)
    said = {
        "path": found.cold.path,
        "cold_ms": found.cold_s * 1e3,
        "floor_ms": found.floor_s * 1e3,
        "over_floor": found.over_floor,
        "attributed": found.cold.attributed,
        "replaced_ms": warm_ms[(len(warm_ms) - 1) // 2],
    }
    if as_json:
        names = ("stage", "ms", "floor_ms", "bytes")
        listed = [dict(zip(names, stage, strict=True)) for stage in stages]
        typer.echo(json.dumps({**said, "stages": listed}))
        return
    for name, took_ms, floor_ms, size in stages:
        of = f"  {_size(size)}" if size else ""
        typer.echo(f"{name:11} {took_ms:9.1f} ms   floor {floor_ms:9.1f} ms{of}")
    typer.echo(
        f"{'in all':11} {said['cold_ms']:9.1f} ms   floor {said['floor_ms']:9.1f} ms,"
        f" {found.over_floor:.2f} times as long; {found.cold.attributed:.1%} lie in a stage\n"
        f"a worker that was killed was replaced in {said['replaced_ms']:.0f} ms"
    )


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise ConfigError(
            f"{text!r} is not a size",
            field="--memory",
            hint="give a number and a unit, as in 24GiB",
        ) from error


def _document(report: ModelReport, memory_bytes: int | None) -> dict[str, Any]:
    """Return the report as JSON fields, whose names do not change in later releases."""
    config = report.config
    return {
        "directory": str(report.directory),
        "supported": report.supported,
        "findings": [asdict(one) | {"file": one.file.name} for one in report.findings],
        "family": config and config.family.value,
        "context": config and config.context,
        "parameters": report.parameters,
        "chat_template": report.has_template,
        "formats": asdict(report.formats),
        "files": report.files,
        "disk_bytes": report.disk_bytes,
        "devices": {
            device: {
                "weights_bytes": footprint.weights_bytes,
                "kv_token_bytes": footprint.kv_token_bytes,
                "kv_page_bytes": footprint.kv_page_bytes,
                "full_context_sequences": memory_bytes
                and config
                and footprint.sequences(memory_bytes, config.context),
            }
            for device, footprint in report.footprints.items()
        },
    }


def _show(report: ModelReport, memory_bytes: int | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 3))
    for name, *values in _rows(report, memory_bytes):
        table.add_row(name, *values)
    console.print(table)
    worst_first = sorted(report.findings, key=lambda finding: not finding.fault)
    for finding in worst_first[:MAX_SHOWN_FINDINGS]:
        kind = Text("wrong", "bold red") if finding.fault else Text("note ", "yellow")
        console.print(kind, Text(f"{finding.file.name}: {_told(finding)}"))
    if len(report.findings) > MAX_SHOWN_FINDINGS:
        console.print(f"and {len(report.findings) - MAX_SHOWN_FINDINGS} more: see --json")


def _told(finding: Finding) -> str:
    if finding.right is None:
        return str(finding)
    return (
        f"{finding} (expected {finding.right})" if finding.fault else f"{finding}; {finding.right}"
    )


def _rows(report: ModelReport, memory_bytes: int | None) -> list[tuple[str, ...]]:
    """Return table rows: a name, and either one value or one value for each device."""
    config, devices = report.config, report.footprints
    rows: list[tuple[str, ...]] = [("supported", "yes" if report.supported else "no")]
    if config is not None:
        rows += [
            ("family", config.family.value),
            ("parameters", f"{report.parameters:,}"),
            ("context", f"{config.context:,} tokens"),
        ]
    rows += [
        ("chat template", "yes" if report.has_template else "no"),
        ("weights on disk", f"{_size(report.disk_bytes)} in {report.files} file(s)"),
    ]
    if str(report.formats):
        rows.append(("held as", str(report.formats)))
    if not devices or config is None:
        return rows
    parts = devices.values()
    rows += [
        ("", *devices),
        ("weights in memory", *(_size(part.weights_bytes) for part in parts)),
        ("keys and values of a token", *(_size(part.kv_token_bytes) for part in parts)),
        ("of a page of 64 tokens", *(_size(part.kv_page_bytes) for part in parts)),
    ]
    if memory_bytes is not None:
        fit = (f"{part.sequences(memory_bytes, config.context):,}" for part in parts)
        rows.append((f"full contexts in {_size(memory_bytes)}", *fit))
    return rows


def _size(count: int) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`."""
    from pydantic import ByteSize

    return ByteSize(count).human_readable(separator=" ")
