"""Check that a checkpoint folder exists, before anything in it is read."""

from __future__ import annotations

from pathlib import Path

from tailrace.ledger.errors import ConfigError


def check_folder(directory: Path, field: str | None = None) -> None:
    """Raise ConfigError if `directory` is not a folder; `field` is the setting that names it."""
    if directory.is_dir():
        return
    problem = "is not a folder" if directory.exists() else "does not exist"
    hint = "give the folder of a checkpoint"
    if _is_hub_name(directory):
        hint = (
            "if it is a model on the Hugging Face hub, download it first:"
            f" hf download {directory} --local-dir {directory.name}"
        )
    raise ConfigError(f"{directory} {problem}", field=field, hint=hint)


def _is_hub_name(directory: Path) -> bool:
    """Return True if `directory` may be a model's name on the Hugging Face hub.

    That is so if it has the form OWNER/NAME, and there is no folder OWNER.
    """
    return len(directory.parts) == 2 and not directory.parent.exists()
