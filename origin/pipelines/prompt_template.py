"""Prompts in the options of stages, with a place for the text that the model gets."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

TEXT_MARK = "{text}"


def _check(template: str) -> str:
    if TEXT_MARK not in template:
        raise ValueError(f"the prompt must contain {TEXT_MARK}")
    return template


PromptTemplate = Annotated[str, AfterValidator(_check)]
"""A prompt as an option of a stage."""


def filled(template: str, text: str) -> str:
    """Return the prompt with a text in its place."""
    return template.replace(TEXT_MARK, text)
