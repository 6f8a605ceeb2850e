"""Prompts in the options of stages, with the placeholder `{text}` for a text of the stream."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

TEXT_MARK = "{text}"


def _check(template: str) -> str:
    if TEXT_MARK not in template:
        raise ValueError(f"the prompt must contain {TEXT_MARK}")
    return template


PromptTemplate = Annotated[str, AfterValidator(_check)]
"""The type of a stage option that is a prompt with the placeholder `{text}`."""


def filled(template: str, text: str) -> str:
    """Return a prompt in which `text` replaces the placeholder."""
    return template.replace(TEXT_MARK, text)
