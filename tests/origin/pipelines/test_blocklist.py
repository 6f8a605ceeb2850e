"""Moderation by a list: each action on prompts, text, reasoning and revisions."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tailrace.ledger.frame import FinishReason
from tailrace.origin.pipelines.moderation import BLOCKED
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.pipelines.stages.blocklist import Blocklist, BlocklistOptions
from tailrace.origin.producer import Data, End, Reasoning, Remark, Revision, Text
from tests.origin.pipelines.staged import stage_of

MESSAGE = "the text was blocked"
END = End(FinishReason.FILTERED, message=MESSAGE)
NOTICE = Remark(BLOCKED, f"list: {MESSAGE}")


def checked(items: list[Item], **options: Any) -> list[Item]:
    """Return what a blocklist of the word "bad" makes of items."""
    given = BlocklistOptions(**{"words": ("bad",), **options})
    stage = stage_of(Blocklist, "list", options=given)
    assert isinstance(stage, Blocklist)
    made: list[Item] = []
    for item in items:
        made += stage.process(item)
        if made and isinstance(made[-1], End):
            return made
    return [*made, *stage.finish(End())]


def joined(items: list[Item]) -> list[Item]:
    """Join consecutive texts."""
    made: list[Item] = []
    for item in items:
        if isinstance(item, Text) and made and isinstance(made[-1], Text):
            made[-1] = Text(made[-1].text + item.text)
        else:
            made.append(item)
    return made


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("end", [Text("all is "), END]),
        ("replace", [Text("all is [removed] here")]),
        ("mask", [Text("all is *** here")]),
        ("notice", [Text("all is "), NOTICE, Text("bad here")]),
    ],
)
def test_what_each_action_does_with_text(action: str, expected: list[Item]) -> None:
    for pieces in (["all is bad here"], list("all is bad here")):
        made = checked([Text(piece) for piece in pieces], action=action)
        assert joined(made) == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("end", [END]),
        ("replace", [Prompt(None, (("user", "[removed]"), ("user", "x")))]),
        ("mask", [Prompt(None, (("user", "***"), ("user", "x")))]),
        ("notice", [NOTICE, Prompt(None, (("user", "bad"), ("user", "x")))]),
    ],
)
def test_what_each_action_does_with_a_prompt(action: str, expected: list[Item]) -> None:
    prompt = Prompt(None, (("user", "bad"), ("user", "x")))
    assert checked([prompt], action=action) == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("end", [Revision("go"), END]),
        ("mask", [Revision("go"), Revision("***"), Revision("*** one", True)]),
    ],
)
def test_what_an_action_does_with_revisions(action: str, expected: list[Item]) -> None:
    said: list[Item] = [Revision("go"), Revision("bad"), Revision("bad one", True)]
    assert checked(said, action=action) == expected


def test_reasoning_is_checked_apart_from_the_text() -> None:
    said: list[Item] = [Reasoning("so ba"), Text("d "), Reasoning("bad"), Text("!")]
    assert joined(checked(said, action="mask")) == [
        Reasoning("so "),
        Reasoning("ba"),
        Text("d "),
        Reasoning("***"),
        Text("!"),
    ]


def test_other_items_pass_and_a_notice_comes_once() -> None:
    said: list[Item] = [Text("bad "), Data(b"bad"), Text("bad ")]
    made = checked(said, action="notice")
    assert made.count(NOTICE) == 1
    assert Data(b"bad") in made
    assert "".join(one.text for one in made if isinstance(one, Text)) == "bad bad "


def test_held_text_is_given_back_unchanged() -> None:
    stage = stage_of(Blocklist, options=BlocklistOptions(words=("bad",)))
    assert isinstance(stage, Blocklist)
    assert list(stage.process(Text("so ba"))) == [Text("so ")]
    assert list(stage.held()) == [Text("ba")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give words or patterns to block"),
        ({"words": [" "]}, "must have 1 to 200 characters"),
        ({"patterns": ["("]}, "is not a regular expression"),
        ({"patterns": ["x*"]}, "matches an empty text"),
        ({"words": ["a"], "action": "stop"}, "action"),
        ({"words": ["a"], "what": 1}, "what"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        BlocklistOptions(**options)
