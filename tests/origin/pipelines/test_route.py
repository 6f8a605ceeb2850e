"""A model chosen by rules: which rule fits, and which of them are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tailrace.origin.pipelines.stage import Prompt
from tailrace.origin.pipelines.stages.route import RouteOptions

RULES = (
    {"model": "tiny", "max_chars": 5, "pattern": r"^hi\b"},
    {"model": "coder", "pattern": r"\bdef\b"},
    {"model": "small", "max_chars": 20},
)


@pytest.mark.parametrize(
    ("texts", "model"),
    [
        (["Hi you"], "small"),
        (["Hi y"], "tiny"),
        (["hive"], "small"),
        (["x" * 20], "small"),
        (["x" * 21], "large"),
        (["x" * 21, "a DEF b"], "coder"),
        (["x" * 10, "y" * 10], "small"),
        (["x" * 10, "y" * 11], "large"),
    ],
)
def test_the_first_rule_that_fits_chooses_the_model(texts: list[str], model: str) -> None:
    options = RouteOptions(model="large", rules=RULES)  # type: ignore[arg-type]
    messages = tuple(("user", text) for text in texts)
    assert options.model_for(Prompt(None, messages)) == model
    if len(texts) == 1:
        assert options.model_for(Prompt(texts[0])) == model


def test_all_models_that_may_be_asked_are_named() -> None:
    options = RouteOptions(model="large", rules=RULES)  # type: ignore[arg-type]
    assert options.asked_models == ("large", "tiny", "coder", "small")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rules": []}, "rules"),
        ({"rules": [{"model": "small"}]}, "give max_chars or pattern"),
        ({"rules": [{"max_chars": 5}]}, "model"),
        ({"rules": [{"model": "small", "pattern": "("}]}, "is not a regular expression"),
        ({"rules": RULES, "prompt": "no mark"}, r"the prompt must contain \{text\}"),
    ],
)
def test_rules_that_are_wrong_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RouteOptions(model="large", **options)
