"""Checks a whole checkpoint, and computes the memory that it needs: `tailrace model check`.

It reports every fault, not only the first. Of the weights it reads only the headers, and both
copies of a tied head, so it is quick for a model of any size. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import TemplateError

from tailrace.kernels.shapes import HEAD_DIMS
from tailrace.ledger.errors import ModelError, TailraceError
from tailrace.ledger.frame import Message
from tailrace.origin.checkpoint.finding import Finding, Findings, read_object
from tailrace.origin.checkpoint.layout import (
    StoredTensor,
    examine_weights,
    stored_tensors,
    weight_files,
)
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, ModelConfig, examine_config
from tailrace.origin.checkpoint.model_memory import (
    Footprint,
    cpu_footprint,
    examine_formats,
    gpu_footprint,
    parameters,
)
from tailrace.origin.checkpoint.prompt import PromptReader, examine_template
from tailrace.origin.checkpoint.tokenizer_file import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    check_tokenizer,
)
from tailrace.origin.formats import AS_STORED, Formats


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The result of a check. Figures are None if config or weights cannot be read."""

    directory: Path
    findings: list[Finding]
    config: ModelConfig | None
    has_template: bool
    files: int
    disk_bytes: int
    parameters: int | None
    formats: Formats
    footprints: dict[str, Footprint] = field(default_factory=dict)
    """Memory by device: cpu, and gpu if the GPU kernels support the model."""

    @property
    def supported(self) -> bool:
        return not any(finding.fault for finding in self.findings)


def check_model(directory: Path, formats: Formats = AS_STORED) -> ModelReport:
    """Check every file of a checkpoint; faults become findings, and nothing is raised.

    `formats` are the number formats in which it would be served.
    """
    findings = Findings()
    config = examine_config(directory, findings)
    if config is None:  # which tensors the model needs is unknown: check the files for damage only
        read_object(directory / TOKENIZER_FILE, findings)
        stored = stored_tensors(directory, findings)
    else:
        check_tokenizer(directory, config.vocab, config.eos_ids, findings)
        stored = examine_weights(directory, config, findings)
        examine_formats(formats, directory, config, findings)
    has_template = examine_template(directory, findings) is not None
    if config is not None and not findings.faults:
        _try_prompts(directory, has_template, findings)
    footprints: dict[str, Footprint] = {}
    if config is not None and not findings.faults:
        footprints = _footprints(directory, config, stored, formats, findings)
    files = [path for path in weight_files(directory, Findings()) if path.is_file()]
    return ModelReport(
        directory=directory,
        findings=findings.all,
        config=config,
        has_template=has_template,
        files=len(files),
        disk_bytes=sum(path.stat().st_size for path in files),
        parameters=None if config is None else parameters(config),
        formats=formats,
        footprints=footprints,
    )


def _footprints(
    directory: Path,
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    formats: Formats,
    findings: Findings,
) -> dict[str, Footprint]:
    devices = {"cpu": cpu_footprint(config, stored, formats)}
    if config.head_dim in HEAD_DIMS:
        devices["gpu"] = gpu_footprint(config, stored, formats)
    else:
        right = "on a GPU one of " + ", ".join(map(str, HEAD_DIMS))
        problem = f"{config.head_dim}: the model runs on a CPU only"
        findings.note(directory / CONFIG_FILE, "head_dim", problem, right)
    return devices


def _try_prompts(directory: Path, has_template: bool, findings: Findings) -> None:
    """Load the tokenizer and make a prompt, to add a finding if either fails."""
    try:
        reader = PromptReader(directory)
    except ModelError as error:
        findings.fault(directory / TOKENIZER_FILE, "", error.message)
        return
    if not has_template:
        right = "requests can have `prompt`, but not `messages`"
        findings.note(directory / TOKENIZER_CONFIG_FILE, "chat_template", "is missing", right)
        return
    try:
        reader.ids(None, [Message("user", "Hello")])
    except (TailraceError, TemplateError) as error:
        problem = f"fails for a plain question: {error}"
        findings.note(directory / TOKENIZER_CONFIG_FILE, "chat_template", problem)
