"""Calls of tools in an engine's runs: as frames, after an interruption, and forced by a grammar."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import (
    FinishReason,
    FormatKind,
    OutputFormat,
    Score,
    ScoredToken,
    StreamEnd,
    TokenScores,
    ToolCall,
    decode,
)
from tailrace.ledger.interface import Record
from tailrace.origin.engine.grammar import GrammarCompiler, OutputGrammar, check_tools
from tailrace.origin.engine.transcript import Detokeniser, Transcript, Vocabulary
from tailrace.origin.generations.stream_log import History
from tailrace.origin.tool_calls import MARKUPS, CallPiece, CallReader, ToolUse
from tailrace.origin.workers.worker_frame import Emission, StartRun
from tests.origin.engine.runs import make_run
from tests.origin.tiny_checkpoint import END_ID, train_tokenizer


class Words:
    """A tokenizer, of which the marks around calls are special tokens or not."""

    def __init__(self, *special: str) -> None:
        self.tokenizer: Tokenizer = train_tokenizer(300)
        self.tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in special])
        self.vocabulary = Vocabulary(self.tokenizer)
        self.compiler = GrammarCompiler(self.tokenizer, self.tokenizer.get_vocab_size(), [END_ID])


WORDS = {
    "letters": Words(),
    "special tokens": Words("<tool_call>", "</tool_call>", "[TOOL_CALLS]"),
}
TOKENIZER = WORDS["letters"].tokenizer
FUNCTIONS = [
    {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 4}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é}"}}\n</tool_call>'
SAID = f"Let me see. {CALL}\n{CALL}"
IN_A_LIST = '{"name": "add", "arguments": {"a": 1, "b": "é}"}, "id": "123456789"}'
SAID_BY: dict[str, str] = {
    "hermes": SAID,
    "mistral": f"Let me see. [TOOL_CALLS] [{IN_A_LIST}, {IN_A_LIST}]",
}


LEGS = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
ANSWERS = [
    OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(LEGS | {"additionalProperties": False})),
    OutputFormat(FormatKind.REGEX, r"(<tool_call>|\[TOOL_CALLS\]|\{)?[01]{1,3}"),
]
MARKS = [mark for markup in MARKUPS.values() for mark in (markup.begins, markup.ends)]


def using(**more: Any) -> ToolUse:
    given = {"functions": json.dumps(FUNCTIONS), "choice": "auto", "markup": "hermes"}
    return ToolUse(**given | more)


def transcript(run: StartRun, tools: ToolUse, words: str = "letters") -> Transcript:
    return Transcript(7, run, WORDS[words].vocabulary, frozenset({END_ID}), 512, None, tools)


def play(made: Transcript, ids: list[int]) -> list[Emission]:
    emissions = made.resume()
    for token in ids[made.total_tokens :]:
        if not made.ended:
            score = Score(token, b"", -1.0)
            emissions += made.accept(token, TokenScores(score))
    return emissions


def frames_of(emissions: list[Emission]) -> list[Any]:
    frames: list[Any] = [decode(emission.frame)[1] for emission in emissions]
    assert [frame.index for frame in frames] == [emission.index for emission in emissions]
    return frames


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("markup", SAID_BY)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_run_with_calls_goes_on_exactly_after_any_of_its_frames(
    logprobs: int | None, markup: str, words: str
) -> None:
    fields: dict[str, Any] = {"max_tokens": 400, "seed": 5, "logprobs": logprobs}
    tools = using(markup=markup)
    ids = [*WORDS[words].tokenizer.encode(SAID_BY[markup]).ids, END_ID]
    whole = play(transcript(make_run(**fields), tools, words), ids)
    frames = frames_of(whole)
    text = "".join(f.text for f in frames if not isinstance(f, ToolCall | StreamEnd))
    calls = [frame for frame in frames if isinstance(frame, ToolCall)]
    assert text == "Let me see."
    assert [(call.call, call.name) for call in calls if call.name] == [(0, "add"), (1, "add")]
    for nth in range(2):
        said = "".join(call.arguments for call in calls if call.call == nth)
        assert json.loads(said) == {"a": 1, "b": "é}"}
    named = [call.id for call in calls if call.id]
    assert len({*named}) == 2
    assert all(id_.startswith("call_") if markup == "hermes" else len(id_) == 9 for id_ in named)
    assert frames[-1].finish_reason is FinishReason.TOOL_CALLS
    assert len(calls) > 10
    if logprobs is not None:
        assert isinstance(frames[0], ScoredToken)
    # A run's emissions for one token are stored together or not at all.
    ends = [at for at in range(1, len(whole)) if whole[at].ids]
    for cut in ends:
        history = History()
        for emission in whole[:cut]:
            history.add(Record(emission.frame, emission.ids))
        rest = make_run(
            **fields,
            generated_ids=tuple(history.ids),
            sent_bytes=history.sent_bytes,
            next_index=history.next_index,
        )
        assert frames_of(play(transcript(rest, tools, words), ids)) == frames[cut:]


def test_one_call_is_enough_where_no_two_may_be() -> None:
    ids = [*TOKENIZER.encode(SAID).ids, END_ID]
    made = play(transcript(make_run(max_tokens=400), using(parallel=False)), ids)
    frames = frames_of(made)
    assert {frame.call for frame in frames if isinstance(frame, ToolCall)} == {0}
    assert frames[-1].finish_reason is FinishReason.TOOL_CALLS
    assert frames[-1].total_tokens < len(ids)


def test_another_seed_has_other_ids_of_calls() -> None:
    ids = TOKENIZER.encode(CALL).ids
    named = {
        next(f.id for f in frames_of(play(transcript(run, using()), ids)) if f.id)
        for run in (make_run(max_tokens=400, seed=seed) for seed in (1, 2))
    }
    assert len(named) == 2


def drawn(seed: int, grammar: OutputGrammar, words: str = "letters") -> tuple[str, bool]:
    """Return a text that a grammar allows, and whether it has come to its end."""
    draw, ids, tokenizer = random.Random(seed), list[int](), WORDS[words].tokenizer
    while not grammar.finished and len(ids) < 300:
        mask = grammar.mask()
        bits = [n for n in range(tokenizer.get_vocab_size()) if mask[n // 32] >> (n % 32) & 1]
        token = END_ID if grammar.may_end and draw.random() < 0.5 else draw.choice(bits)
        grammar.accept(token)
        ids.append(token)
    said = Detokeniser(WORDS[words].vocabulary, marks=MARKS)
    return "".join(said.step(token) for token in ids if token != END_ID), grammar.finished


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind.word)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("markup", MARKUPS)
def test_beside_an_output_format_the_text_is_calls_or_an_answer_in_it(
    markup: Any, words: str, answer: OutputFormat
) -> None:
    tools = using(markup=markup)
    tools = check_tools(tools, answer)
    kinds = set()
    for seed in range(40):
        grammar = WORDS[words].compiler.start_calls(tools, (), answer)
        text, finished = drawn(seed, grammar, words)
        reader = CallReader(markup)
        said = [*reader.feed(text), *reader.feed("", last=True)]
        if not finished:
            continue
        kinds.add(reader.calls > 0)
        if reader.calls:
            assert all(isinstance(piece, CallPiece) for piece in said), text
        elif answer.kind is FormatKind.REGEX:
            assert re.fullmatch(answer.source, text) and said == [text]
        else:
            assert json.loads("".join(map(str, said)))["legs"] in (2, 4)
    assert kinds == {True, False}


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("markup", MARKUPS)
@pytest.mark.parametrize(("only", "parallel"), [(None, True), (None, False), ("now", False)])
def test_whatever_is_drawn_under_a_forced_choice_is_calls_of_those_tools(
    markup: Any, words: str, only: str | None, parallel: bool
) -> None:
    tools = using(choice="required", only=only, parallel=parallel, markup=markup)
    tools = check_tools(tools)
    for seed in range(12):
        text, finished = drawn(seed, WORDS[words].compiler.start_calls(tools), words)
        reader = CallReader(markup)
        pieces = [*reader.feed(text), *reader.feed("", last=True)]
        assert all(isinstance(piece, CallPiece) for piece in pieces), text
        if finished:
            assert reader.whole == reader.calls >= 1
            assert parallel or reader.calls == 1
        names = {piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name}
        assert names <= ({only} if only else {"add", "now"})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "wizard"}, "Invalid type: wizard"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=x)", "type": "string"}}}, ""),
    ],
)
def test_a_schema_that_no_grammar_can_hold_is_refused_by_name(
    parameters: dict[str, Any], says: str
) -> None:
    functions = [*FUNCTIONS, {"name": "bad", "parameters": parameters}]
    with pytest.raises(CallerError) as caught:
        check_tools(using(choice="required", functions=json.dumps(functions)))
    assert caught.value.field == "tools[2].parameters"
    assert says in caught.value.message


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(700):
        schema = {"items": schema}
    functions = [*FUNCTIONS, {"name": "deep", "parameters": schema}]
    with pytest.raises(CallerError) as caught:
        check_tools(using(choice="required", functions=json.dumps(functions)))
    assert caught.value.field == "tools[2].parameters"
