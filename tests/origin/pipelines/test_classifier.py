"""A model is asked about prompts and text, and its answers decide what is passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.ledger.frame import (
    Classification,
    FinishReason,
    Frame,
    Open,
    Opened,
    StreamEnd,
    Token,
)
from tailrace.origin.pipelines.moderation import BLOCKED
from tailrace.origin.pipelines.origin_client import OriginClient
from tailrace.origin.pipelines.runner import STAGE_SKIPPED
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.pipelines.stages.classifier import Classifier, ClassifierOptions
from tailrace.origin.producer import Data, End, Reasoning, Remark, Revision, Text
from tests.origin.pipelines.staged import (
    STREAM,
    Words,
    asynchronous,
    cut_at,
    run,
    running,
    stage_of,
)

pytestmark = pytest.mark.anyio

GIVEN: dict[str, Any] = {"model": "judge", "prompt": "Is it bad? {text}", "block_if": "yes"}
MESSAGE = "the text was blocked"
END = End(FinishReason.FILTERED, message=MESSAGE)
NOTICE = Remark(BLOCKED, f"judge: {MESSAGE}")


class Judge(OriginClient):
    """An origin whose model answers yes if a text has the word "bad"; it keeps its answers."""

    def __init__(self, reason: FinishReason = FinishReason.STOP, fails_at: int = 0) -> None:
        super().__init__(Path("none"))
        self.reason = reason
        self.fails_at = fails_at
        self.asked: list[Open] = []
        self.answers: dict[str, Frame] = {}

    async def read(self, request: Open) -> AsyncGenerator[Frame, None]:
        self.asked.append(request)
        assert request.prompt is not None
        assert request.idempotency_key is not None
        key = request.idempotency_key.rpartition(":")[0]  # without the digest of the prompt
        is_bad = "bad" in request.prompt.removeprefix("Is it bad?")
        answer = self.answers.setdefault(key, Token(" Yes." if is_bad else " No.", 0))
        yield Opened(STREAM, 0, "", request.model, 1)
        yield answer
        is_failed = len(self.asked) == self.fails_at
        reason = FinishReason.FAILED if is_failed else self.reason
        yield StreamEnd(3, reason, 1, 20)

    @property
    def texts(self) -> list[str]:
        """The texts that were asked about."""
        return [(one.prompt or "").removeprefix("Is it bad? ") for one in self.asked]


async def checked(judge: Judge, items: list[Item], **options: Any) -> list[Item]:
    """Return what a classifier makes of items."""
    given = ClassifierOptions(**GIVEN | options)
    stage = stage_of(Classifier, "judge", options=given, origin=judge)
    return await asynchronous(stage, items)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("end", [Text("all is "), END]),
        ("replace", [Text("all is "), Text("[removed]"), Text("here")]),
        ("mask", [Text("all is "), Text("********"), Text("here")]),
        ("notice", [Text("all is "), NOTICE, Text("bad bad "), Text("here")]),
    ],
)
async def test_each_buffer_is_passed_on_as_its_answer_says(
    action: str, expected: list[Item]
) -> None:
    judge = Judge()
    said: list[Item] = [Text("all i"), Text("s ba"), Text("d bad here")]
    assert await checked(judge, said, action=action, buffer_chars=8) == expected
    asked = ["all is ", "bad bad ", "here"]
    assert judge.texts == (asked[:2] if action == "end" else asked)
    keys = [one.idempotency_key for one in judge.asked]
    assert list(judge.answers) == [f"{STREAM.hex()}:judge:{nth}" for nth in range(1, len(keys) + 1)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("end", [END]),
        ("replace", [Prompt(None, (("user", "[removed]"), ("user", "[removed]")))]),
        ("notice", [NOTICE, Prompt(None, (("user", "bad"), ("user", "x")))]),
    ],
)
async def test_a_prompt_is_asked_about_as_a_whole(action: str, expected: list[Item]) -> None:
    judge = Judge()
    prompt = Prompt(None, (("user", "bad"), ("user", "x")))
    assert await checked(judge, [prompt], action=action, buffer_chars=1) == expected
    assert judge.texts == ["bad\nx"]
    assert await checked(Judge(), [Prompt("good")]) == [Prompt("good")]


async def test_interim_text_is_left_out_and_other_items_keep_their_place() -> None:
    said: list[Item] = [Revision("bad"), Reasoning("so"), Text("go"), Data(b"bad"), Text("od")]
    passed: list[Item] = said[1:]
    assert await checked(Judge(), said) == passed
    assert await checked(Judge(), [Revision("x"), Revision("bad", True)]) == [Revision("x"), END]


async def test_an_empty_replacement_leaves_text_out() -> None:
    said: list[Item] = [Text("bad"), Revision("bad", True)]
    options = {"action": "replace", "replacement": ""}
    assert await checked(Judge(), said, **options) == [Revision("", True)]


async def test_a_label_is_an_answer() -> None:
    judge = Judge()
    judge.answers[f"{STREAM.hex()}:judge:1"] = Classification("yes", 0.9, 0)
    assert await checked(judge, [Text("good")]) == [END]


@given(st.text("bad \n", max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_questions_depend_on_the_text_alone(text: str, cuts: list[int]) -> None:
    options = {"buffer_chars": 7, "action": "replace"}
    whole, cut = Judge(), Judge()
    expected = asyncio.run(checked(whole, [Text(text)] if text else [], **options))
    pieces: list[Item] = [Text(piece) for piece in cut_at(text, cuts)]
    assert asyncio.run(checked(cut, pieces, **options)) == expected
    assert cut.asked == whole.asked
    assert "".join(whole.texts) == text


async def test_stages_that_run_again_get_the_same_answers() -> None:
    judge = Judge()
    judge.answers[f"{STREAM.hex()}:judge:2"] = Token("Yes", 0)
    said: list[Item] = [Text("one two three")]
    options = {"buffer_chars": 4, "action": "mask"}
    expected = [Text("one "), Text("****"), Text("thre"), Text("e")]
    assert await checked(judge, said, **options) == expected
    asked = list(judge.asked)
    assert await checked(judge, said, **options) == expected
    assert judge.asked[len(asked) :] == asked


async def test_a_classifier_without_an_answer_ends_the_stream() -> None:
    options = ClassifierOptions(**GIVEN, buffer_chars=4)
    for reason in (FinishReason.FAILED, FinishReason.CANCELLED, FinishReason.FILTERED):
        judge = Judge(reason)
        made = await run([running(Words), running(Classifier, options=options, origin=judge)], "a")
        why = f"the model judge gave no answer: its stream ended as {reason.word}"
        message = f"the stage classifier failed: {why}"
        assert made == [End(FinishReason.FAILED, message=message, retryable=True)]


async def test_an_optional_classifier_that_fails_passes_on_what_it_held() -> None:
    options = ClassifierOptions(**GIVEN, buffer_chars=8, action="replace")  # type: ignore[arg-type]
    judge = Judge(fails_at=2)
    asks = running(Classifier, options=options, origin=judge, optional=True)
    *made, notice, last, end = await run([running(Words), asks], "one bad two three")
    assert made == [Text("[removed]"), Text("two ")]
    assert isinstance(notice, Remark)
    assert notice.code == STAGE_SKIPPED
    assert [last, end] == [Text("three "), End()]


async def test_the_tokens_of_all_answers_are_counted() -> None:
    stage = stage_of(Classifier, options=ClassifierOptions(**GIVEN, buffer_chars=4), origin=Judge())
    assert isinstance(stage, Classifier)
    await asynchronous(stage, [Text("one two")])
    assert [(one.prompt_tokens, one.total_tokens) for one in stage.ends] == [(20, 3), (20, 3)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"block_if": "("}, "is not a regular expression"),
        ({"block_if": "x*"}, "matches an empty text"),
        ({"prompt": "no mark"}, r"the prompt must contain \{text\}"),
        ({"buffer_chars": 0}, "buffer_chars"),
        ({"action": "stop"}, "action"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ClassifierOptions(**GIVEN | options)
