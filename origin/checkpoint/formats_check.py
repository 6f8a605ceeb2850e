"""Whether a model can have the number formats that were asked for; no torch."""

from __future__ import annotations

from pathlib import Path

from kernels.shapes import Family
from origin.checkpoint.finding import Findings
from origin.checkpoint.layout import linears
from origin.checkpoint.model_config import CONFIG_FILE, ModelConfig
from origin.formats import Formats

WEIGHT_GROUP = 128
"""Inputs that int4 weights of one row share a scale for; int8 ones lie in such groups."""
HEAD_GROUP = 4
"""Inputs of an int8 head that are multiplied by one instruction."""


def examine_formats(
    formats: Formats, directory: Path, config: ModelConfig, findings: Findings
) -> None:
    """Find fault with what this model cannot have, whatever it runs on."""
    file = directory / CONFIG_FILE
    if formats.weights != "auto" and config.family is Family.BITNET:
        problem = f"ternary weights of bitnet cannot be held as {formats.weights}"
        findings.fault(file, "model_type", problem, "the setting weights = auto")
    elif formats.weights != "auto":
        for name, (_, inputs) in linears(config).items():
            if inputs % WEIGHT_GROUP:
                right = f"a multiple of {WEIGHT_GROUP}, or the setting weights = auto"
                problem = f"{inputs} inputs, for {formats.weights} weights"
                findings.fault(file, name, problem, right)
    if formats.head == "int8" and config.hidden % HEAD_GROUP:
        right = f"a multiple of {HEAD_GROUP}, or the setting head = auto"
        findings.fault(file, "hidden_size", f"{config.hidden}, for an int8 head", right)


def refuse_formats(formats: Formats, directory: Path, config: ModelConfig) -> None:
    """Raise ModelError for what this model cannot have."""
    findings = Findings()
    examine_formats(formats, directory, config, findings)
    findings.refuse()
