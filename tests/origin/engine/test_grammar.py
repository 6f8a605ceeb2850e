"""Output formats: grammars that mask tokens."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tailrace.kernels.sampler.sampler import Sampling, sample
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import FormatKind
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.engine.grammar import (
    MAX_MESSAGE_CHARS,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SPACES,
    GrammarCompiler,
    Mask,
    OutputGrammar,
    check_format,
)
from tests.origin.engine.runs import fallback_tokenizer
from tests.origin.tiny_checkpoint import END_ID, train_tokenizer

JSON, REGEX = FormatKind.JSON_SCHEMA, FormatKind.REGEX
TOKENIZERS = {
    "tiny": train_tokenizer(300),
    "demo": Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
    "fallback": fallback_tokenizer(),
}
PADDING = 37
"""Rows of the head that no token has; the vocab is no multiple of 32 then."""
COMPILERS = {
    name: GrammarCompiler(tokenizer, tokenizer.get_vocab_size() + PADDING, [END_ID])
    for name, tokenizer in TOKENIZERS.items()
}
MAX_TOKENS = 400


def ids_of(mask: Mask) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in bits.nonzero()[0]]


def draw_all(grammar: OutputGrammar, draw: random.Random) -> list[int]:
    """Random tokens under the masks until the grammar has ended, which it may as soon as it can."""
    ids: list[int] = []
    while not grammar.finished and len(ids) < MAX_TOKENS:
        allowed = ids_of(grammar.mask())
        assert (END_ID in allowed) == grammar.may_end
        token = END_ID if grammar.may_end and draw.random() < 0.2 else draw.choice(allowed)
        grammar.accept(token)
        ids.append(token)
    return ids


def text_of(name: str, ids: list[int]) -> str:
    return str(TOKENIZERS[name].decode(ids))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["fox", "狐", "bear"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        value.keys() <= {"name", "age", "tags"}
        and 1 <= len(value["name"]) <= 6
        and value["age"] in range(151)
        and type(value["age"]) is int
        and len(value.get("tags", [])) <= 3
        and set(value.get("tags", [])) <= {"fox", "狐", "bear"}
    )


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    (PERSON, is_person),
    ({"enum": ["yes", "no", 7, None]}, lambda value: value in ("yes", "no", 7, None)),
    (
        {"type": "string", "pattern": "^[a-c狐]{2,4}$"},
        lambda v: bool(re.fullmatch("[a-c狐]{2,4}", v)),
    ),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, lambda v: v is None or type(v) is bool),
    ({"type": "array", "items": {"type": "number"}, "maxItems": 4}, lambda v: len(v) <= 4),
    ({"enum": ["狐"], "x-guidance": {"whitespace_pattern": "a"}}, lambda v: v == "狐"),
]
REGEXES = [
    "(yes|no)",
    "[a-c]{3}-[0-9]+",
    "狐{1,3}(🐻|é)?",
    "(the )?(fox|bear)s? ran\\.",
    "[^a-z]{4}",
]


def white_space_of(text: str) -> set[str]:
    """White space outside of strings, each with the character before it."""
    return set(re.findall(r"\S?\s+", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_whatever_is_drawn_under_the_masks_is_of_the_schema(name: str, number: int) -> None:
    schema, is_valid = SCHEMAS[number]
    ended = 0
    for seed in range(12):
        grammar = COMPILERS[name].start(JSON, check_format(JSON, json.dumps(schema)).source)
        ids = draw_all(grammar, random.Random(seed))
        if grammar.finished:  # digits can go on and on
            text = text_of(name, ids)
            assert is_valid(json.loads(text))
            assert white_space_of(text) <= {", ", ": "}
            ended += 1
    assert ended > 6


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("regex", REGEXES)
def test_whatever_is_drawn_under_the_masks_matches_the_expression(name: str, regex: str) -> None:
    seen = set()
    for seed in range(12):
        grammar = COMPILERS[name].start(REGEX, regex)
        ids = draw_all(grammar, random.Random(seed))
        assert grammar.finished
        seen.add(text_of(name, ids))
        assert re.fullmatch(regex, text_of(name, ids))
    assert len(seen) > 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_after_any_number_of_tokens_a_new_grammar_has_the_same_masks(name: str) -> None:
    source = json.dumps(PERSON)
    whole = COMPILERS[name].start(JSON, source)
    ids = draw_all(whole, random.Random(3))
    again = COMPILERS[name].start(JSON, source)
    for cut, token in enumerate(ids):
        replayed = COMPILERS[name].start(JSON, source, ids[:cut])
        assert replayed.may_end == again.may_end
        assert (replayed.mask() == again.mask()).all()
        again.accept(token)
    assert COMPILERS[name].start(JSON, source, ids).finished == whole.finished


def test_a_character_of_several_tokens_is_allowed_one_token_at_a_time() -> None:
    ids = TOKENIZERS["tiny"].encode("狐").ids
    grammar = COMPILERS["tiny"].start(REGEX, "狐+")
    assert len(ids) > 1
    for token in ids:
        assert not grammar.may_end
        assert ids_of(grammar.mask()) == [token]
        grammar.accept(token)
    assert ids_of(grammar.mask()) == [END_ID, ids[0]]


def test_a_mask_fits_the_sampler_and_allows_no_padding() -> None:
    vocab = TOKENIZERS["tiny"].get_vocab_size() + PADDING
    mask = COMPILERS["tiny"].start(REGEX, "(.|\\n)*").mask()
    assert mask.dtype == np.int32 and mask.shape == (-(-vocab // 32),)
    assert max(ids_of(mask)) < TOKENIZERS["tiny"].get_vocab_size()
    token = sample(torch.randn(vocab), Sampling(), 0, torch.from_numpy(mask))
    assert token in ids_of(mask)


def test_a_tokenizer_that_pads_and_truncates_makes_no_difference() -> None:
    cutting = Tokenizer.from_str(TOKENIZERS["tiny"].to_str())
    cutting.enable_truncation(1)
    cutting.enable_padding(length=9)
    compiler = GrammarCompiler(cutting, cutting.get_vocab_size() + PADDING, [END_ID])
    for source in ("the fox", "[a-z ]+"):
        mask = compiler.start(REGEX, source).mask()
        assert (mask == COMPILERS["tiny"].start(REGEX, source).mask()).all()


def test_masks_are_arrays_of_their_own() -> None:
    grammar = COMPILERS["tiny"].start(REGEX, "a+")
    first = grammar.mask()
    first[:] = 0
    assert grammar.mask().any()


@pytest.mark.parametrize("ends", [[], [END_ID], [END_ID, 310], [310], [310, 400]])
def test_every_end_of_text_is_allowed_where_the_text_is_whole(ends: list[int]) -> None:
    """Also one that only the head knows; one that not even the head knows cannot be drawn."""
    compiler = GrammarCompiler(TOKENIZERS["tiny"], 320, ends)
    a, b = (TOKENIZERS["tiny"].encode(char).ids[0] for char in "ab")
    grammar = compiler.start(REGEX, "ab?")
    assert ids_of(grammar.mask()) == [a]
    grammar.accept(a)
    assert ids_of(grammar.mask()) == sorted({b, *ends} - {400})
    for token in set(ends) - {400}:
        assert compiler.start(REGEX, "ab?", [a, token]).finished


def follows(schema: Any, text: str) -> bool:
    """Return True if a run of the schema may write this text and end."""
    source = check_format(JSON, json.dumps(schema)).source
    try:
        ids = TOKENIZERS["demo"].encode(text).ids
        return COMPILERS["demo"].start(JSON, source, ids).may_end
    except CallerError:
        return False


A = {"type": "object", "properties": {"a": {"const": 1}}}
B = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        (A, '{"a": 1}', '{"a": 1, "x": 3}'),
        ({"properties": {}, "type": "object"}, "{}", '{"x": 3}'),
        ({"type": "array", "items": A}, '[{"a": 1}, {}]', '[{"x": 3}]'),
        ({"anyOf": [A, B, {"type": "null"}]}, '{"b": 2}', '{"b": 2, "x": 3}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a": 1}', '{"x": 3}'),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, '{"a": 1}', '{"x": 3}'),
        ({"type": "object", "properties": {"in": A}}, '{"in": {"a": 1}}', '{"in": {"x": 3}}'),
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(
    schema: Any, text: str, other: str
) -> None:
    assert follows(schema, text)
    assert not follows(schema, other)
    opened = check_format(JSON, json.dumps(schema), open_objects=True).source
    ids = TOKENIZERS["demo"].encode(other).ids
    assert COMPILERS["demo"].start(JSON, opened, ids).may_end


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x": 3}'),
        (A | {"additionalProperties": True}, '{"a": 1, "x": 3}'),
        (A | {"additionalProperties": {"type": "integer"}}, '{"x": 3}'),
        (A | {"patternProperties": {"^x": {"const": 3}}}, '{"a": 1, "x": 3}'),
        (A | {"required": ["x"]}, '{"a": 1, "x": 3}'),
        ({"allOf": [A, B]}, '{"a": 1, "b": 2}'),
        (A | {"anyOf": [B, {"required": ["c"]}]}, '{"a": 1, "b": 2}'),
        (A | {"$ref": "#/$defs/B", "$defs": {"B": B}}, '{"a": 1, "b": 2}'),
    ],
)
def test_an_object_that_may_have_others_stays_open(schema: Any, text: str) -> None:
    assert follows(schema, text)


@pytest.mark.parametrize("required", ["a", [["a"]], [{}]])
def test_a_list_of_required_properties_that_is_none_is_no_fault_of_ours(required: Any) -> None:
    with pytest.raises(CallerError):
        check_format(JSON, json.dumps(A | {"required": required}))


def test_a_stream_that_an_earlier_version_began_may_go_on_with_white_space() -> None:
    old = TOKENIZERS["demo"].encode('{\n  "name"').ids
    assert not COMPILERS["demo"].start(JSON, json.dumps(PERSON), old).finished
    with pytest.raises(CallerError):
        COMPILERS["demo"].start(JSON, check_format(JSON, json.dumps(PERSON)).source, old)


def test_white_space_in_a_json_text_is_limited() -> None:
    brace, space = (TOKENIZERS["tiny"].encode(char).ids[0] for char in "{ ")
    grammar = COMPILERS["tiny"].start(JSON, json.dumps(PERSON), [brace])
    for _ in range(MAX_SPACES):
        assert space in ids_of(grammar.mask())
        grammar.accept(space)
    assert space not in ids_of(grammar.mask())


def test_an_expression_that_only_tokens_outside_the_head_can_go_on_with_fails() -> None:
    small = GrammarCompiler(TOKENIZERS["tiny"], 40, [END_ID])
    with pytest.raises(CallerError, match="no token of the model") as caught:
        small.start(REGEX, "狐").mask()
    assert caught.value.code == "format_stuck"


def test_it_is_finished_as_soon_as_nothing_but_the_end_can_follow() -> None:
    grammar = COMPILERS["tiny"].start(JSON, '{"enum": [true]}')
    assert not grammar.finished
    for token in TOKENIZERS["tiny"].encode("true").ids:
        grammar.accept(token)
    assert grammar.finished


def test_an_expression_that_only_nothing_matches_is_finished_at_once() -> None:
    grammar = COMPILERS["tiny"].start(REGEX, "")
    assert grammar.finished or ids_of(grammar.mask()) == [END_ID]


# ---- drafts ----


@pytest.mark.parametrize("name", TOKENIZERS)
def test_masks_of_drafts_are_those_of_taking_them_one_by_one(name: str) -> None:
    source = json.dumps(PERSON)
    draw = random.Random(5)
    ids = draw_all(COMPILERS[name].start(JSON, source), draw)
    for start in range(0, len(ids), 5):
        drafts = [token for token in ids[start : start + 6] if token != END_ID]
        grammar = COMPILERS[name].start(JSON, source, ids[:start])
        stepped = COMPILERS[name].start(JSON, source, ids[:start])
        masks = grammar.draft_masks(drafts)
        assert len(masks) >= len(drafts)
        for mask, draft in zip(masks, [*drafts, None], strict=False):
            assert (mask == stepped.mask()).all()
            if draft is not None:
                stepped.accept(draft)
        assert (grammar.mask() == masks[0]).all()


def test_a_draft_that_is_not_allowed_ends_the_masks() -> None:
    tokenizer = TOKENIZERS["tiny"]
    grammar = COMPILERS["tiny"].start(REGEX, "abc")
    a, b, x = (tokenizer.encode(char).ids[0] for char in "abx")
    assert [ids_of(mask) for mask in grammar.draft_masks([a, x, b])] == [[a], [b]]
    assert len(grammar.draft_masks([x])) == 1
    assert len(grammar.draft_masks([a, b, END_ID])) == 3
    grammar.accept(a)
    assert ids_of(grammar.mask()) == [b]


def test_a_draft_that_finishes_the_text_needs_no_mask_after_it() -> None:
    a = TOKENIZERS["tiny"].encode("a").ids[0]
    grammar = COMPILERS["tiny"].start(REGEX, "aa")
    assert len(grammar.draft_masks([a, a, a])) == 2
    assert not grammar.finished
    grammar.accept(a)
    grammar.accept(a)
    assert grammar.finished


# ---- refusals ----


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (JSON, "{", "the schema is not JSON"),
        (JSON, '{"const": NaN}', "NaN is not a JSON number"),
        (JSON, "[" * 20_000, "the schema is not JSON"),
        (JSON, '{"type": "strin"}', "Invalid type: strin"),
        (JSON, "[]", "schema must be an object or boolean"),
        (JSON, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        (JSON, "false", "Unsatisfiable schema"),
        (JSON, '{"$ref": "https://example.com/schema"}', "https://example.com/schema"),
        (JSON, '{"type": "string", "pattern": "("}', "unclosed group"),
        (JSON, '{"type": "string"} }], "x": [{ "a": 1', "the schema is not JSON"),
        (REGEX, "(", "unclosed group"),
        (REGEX, "(?=a)b", "look-around"),
        (REGEX, "a^b", "lookarounds not supported"),
        (JSON, '{"multipleOf": 10007}', "multipleOf of which the product is above"),
        (JSON, f'"{"a" * MAX_SCHEMA_BYTES}"', f"is longer than {MAX_SCHEMA_BYTES} bytes"),
        (REGEX, "a" * (MAX_REGEX_BYTES + 1), f"is longer than {MAX_REGEX_BYTES} bytes"),
        (REGEX, "é" * (MAX_REGEX_BYTES // 2 + 1), f"is longer than {MAX_REGEX_BYTES} bytes"),
    ],
)
def test_a_format_that_no_run_can_have_is_refused(
    kind: FormatKind, source: str, message: str
) -> None:
    with pytest.raises(CallerError) as caught:
        check_format(kind, source)
    assert message in caught.value.message
    assert caught.value.field == "format"
    assert len(caught.value.message) <= MAX_MESSAGE_CHARS
    assert "start:" not in caught.value.message
    with pytest.raises(CallerError):
        COMPILERS["tiny"].start(kind, source)


@pytest.mark.parametrize("schema", [True, {}, *(schema for schema, _ in SCHEMAS)])
def test_a_schema_that_can_be_followed_passes(schema: Any) -> None:
    check_format(JSON, json.dumps(schema))


@pytest.mark.parametrize("regex", [*REGEXES, "a/b\nstart: /c/"])
def test_an_expression_that_can_be_followed_passes(regex: str) -> None:
    check_format(REGEX, regex)


def test_an_expression_is_no_grammar() -> None:
    """Text that looks like the end of one rule and the start of another must be matched as text."""
    wanted = "a/b\nstart: /c/"
    grammar = COMPILERS["tiny"].start(REGEX, wanted)
    for token in TOKENIZERS["tiny"].encode(wanted).ids:
        assert token in ids_of(grammar.mask())
        grammar.accept(token)
    assert grammar.finished


def test_ids_that_are_not_of_the_format_cannot_be_gone_on_from() -> None:
    a, x = (TOKENIZERS["tiny"].encode(char).ids[0] for char in "ax")
    with pytest.raises(CallerError, match="doesn't satisfy the grammar") as caught:
        COMPILERS["tiny"].start(REGEX, "a+", [a, x])
    assert caught.value.code == "format_broken"
    with pytest.raises(CallerError, match="follows the end of the format"):
        COMPILERS["tiny"].start(REGEX, "a+", [a, END_ID, a])


def test_a_format_that_no_token_begins_fails_with_a_message() -> None:
    source = '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    grammar = COMPILERS["tiny"].start(JSON, source)
    with pytest.raises(CallerError) as caught:
        grammar.mask()
    assert caught.value.field == "format"


def test_the_supervisor_can_check_formats_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from tailrace.origin.engine.grammar import check_format\n"
        "from tailrace.ledger.frame import FormatKind\n"
        "check_format(FormatKind.REGEX, 'a+')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
