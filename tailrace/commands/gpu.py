"""`tailrace gpu`: look at the GPUs of this machine before a model is served on them.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from tailrace.commands.options import JsonOption, command_group

if TYPE_CHECKING:
    from tailrace.origin.gpu.faults import Fault, GpuFacts

EXIT_NOT_USABLE = 1

gpu_app = command_group("Check the GPUs of this machine.")


@gpu_app.callback()
def _group() -> None:
    """Keep `check` a subcommand: without a callback, typer would drop a single command's name."""


@gpu_app.command()
def check(as_json: JsonOption = False) -> None:
    """Check if models can be served on this machine's GPUs.

    Looks at the driver, the GPUs that CUDA shows, PyTorch, Triton and the C compiler, and compiles
    and runs one kernel on every GPU. A worker does the same before it reads a checkpoint. Each
    fault is one line with its cure.
    The exit status is 0 if the GPUs can be used, and 1 if not.
    """
    from tailrace.origin.gpu.faults import judge
    from tailrace.origin.gpu.probe import probe

    facts = probe()
    faults = judge(facts)
    if as_json:
        typer.echo(json.dumps(_document(facts, faults), indent=2))
    else:
        for line in (*_lines(facts), *(f"fault: {fault}" for fault in faults)):
            typer.echo(line)
    if faults:
        raise typer.Exit(EXIT_NOT_USABLE)


def _document(facts: GpuFacts, faults: list[Fault]) -> dict[str, Any]:
    return {
        "usable": not faults,
        "faults": [asdict(fault) for fault in faults],
        **asdict(facts),
    }


def _lines(facts: GpuFacts) -> list[str]:
    supported = ".".join(map(str, facts.driver_cuda)) if facts.driver_cuda else ""
    cuda = f", CUDA {supported}" if supported else ""
    torch_cuda = f", built for CUDA {facts.torch_cuda}" if facts.torch_cuda else ""
    shown = {
        "driver": (facts.driver or "found") + cuda if facts.has_driver_library else "",
        "PyTorch": facts.torch and facts.torch + torch_cuda,
        "Triton": facts.triton,
        "C compiler": facts.compiler,
        "Python.h": facts.python_header,
    }
    lines = [f"{name + ':':12}{value or 'not found'}" for name, value in shown.items()]
    lines += map(str, facts.devices)
    if facts.has_run:
        lines.append("a kernel was compiled and run on every GPU, with the right result")
    return lines
