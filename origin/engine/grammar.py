"""Structured output: the ids that a JSON schema or a regular expression allows next.

llguidance (https://github.com/guidance-ai/llguidance) does the matching, over the bytes of the
tokens. The allowed ids depend on the run's format and its generated ids alone, so a continuation
replays the ids and gets the masks of the uninterrupted run.

The supervisor imports `check_format` and `check_tools` from here; neither needs torch. These
functions fix how JSON is written and which objects are closed. A recipe stores the resulting
schema, so that another version or setting does not change a stream that has begun.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tailrace.ledger.errors import CallerError, ModelError
from tailrace.ledger.frame import FormatKind, OutputFormat
from tailrace.origin.tool_calls import MARKUPS, Markup, ToolUse, read_functions

MAX_REGEX_BYTES = 4 * 1024
"""Maximum UTF-8 bytes of a regular expression, or of one pattern in a schema."""
MAX_JOINED_PATTERNS = 10
"""Maximum number of different patterns and formats in a schema that joins others (see `JOINING`).

Each further pattern or format triples the time of a check.
"""
MAX_MULTIPLE = 10_000
"""Maximum product of the different values of `multipleOf` in a schema.

Values are counted in units of their last decimal place: 0.25 counts as 25.
"""
JOINING = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if"))

MAX_SCHEMA_BYTES = 64 * 1024
"""Maximum UTF-8 bytes of a JSON schema."""
MAX_MESSAGE_CHARS = 500
"""Maximum characters of llguidance's message; its longest messages quote the whole grammar."""
MAX_SPACES = 32
"""Maximum number of white-space characters in one place of a JSON text, for schemas that earlier
versions stored."""
GUIDANCE = "x-guidance"
"""Keyword of llguidance at the root of a schema, which sets how the JSON is written."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's json.dumps writes it.

Small models waste tokens on white space if a grammar allows any.
"""
MASK_BITS = 32
"""Number of vocabulary ids for which one word of a mask has a bit."""
Mask = NDArray[np.int32]
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms of work
    step_lexer_fuel=200_000,  # about 15 ms of work for one mask
    step_max_items=50_000,
    max_lexer_states=50_000,  # which take about 100 MB of memory
    max_grammar_size=100_000,
    verbose_errors=False,  # verbose errors would quote the output of the run
)


def why_costly(schema: Any) -> str | None:
    """Return why following a parsed schema would block the worker, or None if it would not.

    llguidance limits most of its work, but not all: it joins schemas by intersecting their
    patterns, in time exponential in their number, and turns a multipleOf into an automaton with as
    many states as its value. This module sets limits for both. Within them a format takes at most
    some tenths of a second to check and to start.
    """
    pairs = list(_pairs(schema))
    patterns = {
        value for key, value in pairs if key in ("pattern", "format") and isinstance(value, str)
    }
    for key, value in pairs:
        if key == "patternProperties" and isinstance(value, dict):
            patterns |= value.keys()
    longest = max(map(size_of, patterns), default=0)
    if longest > MAX_REGEX_BYTES:
        return f"a pattern of {longest} bytes, the limit is {MAX_REGEX_BYTES}"
    joins = any(key in JOINING for key, _ in pairs)
    if joins and len(patterns) > MAX_JOINED_PATTERNS:
        return (
            f"{len(patterns)} different patterns and formats in a schema with anyOf, allOf or"
            f" $ref, the limit is {MAX_JOINED_PATTERNS}"
        )
    multiples = {value for key, value in pairs if key == "multipleOf" and _is_number(value)}
    if _product(multiples) > MAX_MULTIPLE:
        return f"multipleOf of which the product is above {MAX_MULTIPLE}"
    return None


def size_of(text: str) -> int:
    """Return the UTF-8 bytes of a text; a lone surrogate, which JSON can escape, counts as one."""
    return len(text.encode(errors="replace"))


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of every object in a JSON value, with its value."""
    if isinstance(value, dict):
        yield from value.items()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _pairs(part)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _product(multiples: set[int | float]) -> Decimal:
    exact = [abs(Decimal(str(multiple))) for multiple in multiples]
    unit = min((Decimal(1).scaleb(_exponent(each)) for each in exact), default=Decimal(1))
    return math.prod((each / unit for each in exact), start=Decimal(1))


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return min(0, exponent) if isinstance(exponent, int) else 0


def check_format(kind: FormatKind, source: str, *, open_objects: bool = False) -> OutputFormat:
    """Return the format in the form that is stored. Raises CallerError with llguidance's reason.

    Admission calls it for `Open.format`. A schema may use the keywords of JSON Schema that
    llguidance supports, and refer to nothing outside itself. JSON is written on one line, and the
    objects of a schema are closed (see `closed`) unless `open_objects` is True. A regular
    expression is one of Rust's regex crate, without look-around, and matches the whole text. The
    check takes 0.1 ms for a small schema, some 50 ms for one of 1000 properties.
    """
    if kind is FormatKind.JSON_SCHEMA:
        if size_of(source) > MAX_SCHEMA_BYTES:
            why = f"the JSON schema is longer than {MAX_SCHEMA_BYTES} bytes"
            raise _refusal(why, "format_too_costly")
        try:
            schema = json.loads(source, parse_constant=_refuse_constant)
            source = json.dumps(_settled(schema, open_objects))
        except (ValueError, RecursionError) as error:
            raise _no_json(error) from error
    if fault := _fault_of(_grammar(kind, source)):
        raise _refusal(fault)
    return OutputFormat(kind, source)


def check_tools(
    tools: ToolUse, answer: OutputFormat | None = None, *, open_objects: bool = False
) -> ToolUse:
    """Return the tools, with the schemas of their parameters in the form that is stored.

    As in `check_format`, JSON is compact, and objects are closed unless `open_objects` is True.
    Raises CallerError for the first tool whose calls no grammar can express, and for an `answer`
    that is too costly together with them.
    """
    if size_of(tools.functions) > MAX_SCHEMA_BYTES:
        why = f"the tools are longer than {MAX_SCHEMA_BYTES} bytes"
        raise _refusal(why, "format_too_costly")
    functions = read_functions(tools.functions)
    for at, function in enumerate(functions):
        field = f"tools[{at}].parameters"
        try:
            function["parameters"] = _settled(function["parameters"], open_objects)
            source = _calls([function], tools)
        except RecursionError as error:
            raise _invalid_parameters(function, "it is nested too deeply", field) from error
        except CallerError as error:
            error.field = field
            raise
        if fault := _fault_of(source):
            why = fault.partition("failed to compile JSON schema: ")[2] or fault
            why = why.partition("\n")[0][:MAX_MESSAGE_CHARS]
            raise _invalid_parameters(function, why, field)
    if answer is not None and (fault := _fault_of(_calls(functions, tools, answer))):
        raise _refusal(fault)
    return tools.model_copy(update={"functions": json.dumps(functions)})


def _invalid_parameters(function: Mapping[str, Any], why: str, field: str) -> CallerError:
    return CallerError(
        f"Invalid schema for function '{function['name']}': {why}",
        code="invalid_function_parameters",
        field=field,
    )


def _settled(schema: Any, open_objects: bool) -> Any:
    """Return a schema that requires compact JSON, and is closed unless `open_objects`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    schema = schema if open_objects else closed(schema)
    return {**schema, GUIDANCE: COMPACT}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the properties that they list.

    JSON Schema allows other properties unless a schema has `additionalProperties: false`, which
    most libraries leave out; a model may spend all its tokens on such properties. An object stays
    open if its schema has a rule for other properties, or requires a property that it does not
    list. A schema that joins objects (`allOf`, or `anyOf` beside `properties`) is not changed,
    since each part would exclude the properties of the others.
    """
    if any(_joins(each) for each in _subschemas(schema)):
        return schema
    made: dict[str, Any] = copy.deepcopy(schema)
    for each in _subschemas(made):
        listed = each.get("properties")
        if not isinstance(listed, dict) or each.keys() & _SAYS_MORE:
            continue
        required = each.get("required", [])
        if isinstance(required, list) and all(
            isinstance(name, str) and name in listed for name in required
        ):
            each["additionalProperties"] = False
    return made


_SAYS_MORE = frozenset(("additionalProperties", "patternProperties", "minProperties"))
_OF_OBJECTS = _SAYS_MORE | {"properties", "required", "maxProperties", "propertyNames"}
_JOINS = frozenset(
    ("if", "then", "else", "not", "dependentSchemas", "dependencies", "unevaluatedProperties")
) | {"$dynamicRef", "$recursiveRef"}
_MEMBERS = ("anyOf", "oneOf", "allOf", "$ref")


def _joins(schema: dict[str, Any]) -> bool:
    """Return True if a value has to match several schemas of objects at once."""
    members = [key for key in _MEMBERS if key in schema]
    parts = schema.get("allOf")
    if schema.keys() & _JOINS or len(members) > 1 or (isinstance(parts, list) and len(parts) > 1):
        return True
    return bool(members) and bool(schema.keys() & _OF_OBJECTS)


_HOLDS_ONE = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames")
_HOLDS_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_HOLDS_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema in a schema, itself first; values of enum and const are no schemas."""
    if not isinstance(schema, dict):
        return
    yield schema
    parts: list[Any] = [schema.get(key) for key in _HOLDS_ONE]
    for key in _HOLDS_LIST:
        parts += each if isinstance(each := schema.get(key), list) else []
    for key in _HOLDS_NAMED:
        parts += each.values() if isinstance(each := schema.get(key), dict) else []
    for part in parts:
        yield from _subschemas(part)


def _fault_of(grammar: str) -> str:
    """Return llguidance's error about a grammar; empty if there is none."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    return messages[0] if is_error else ""


class GrammarCompiler:
    """Compiles formats to grammars for one model; building it takes up to a second.

    The engine makes one with the model's tokenizer, the number of its logits (which may exceed the
    tokenizer's ids) and its end-of-text ids, and calls `start` for each run that has a format.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Collection[int]) -> None:
        self._vocab = vocab
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {about.content: token for token, about in added.items() if about.special}
        known = tokenizer.get_vocab_size()
        ends = sorted(token for token in self._eos_ids if token < known)
        whole = Tokenizer.from_str(tokenizer.to_str())
        whole.no_padding()  # llguidance encodes a grammar's fixed text with this copy
        whole.no_truncation()
        try:
            self._tokenizer = LLTokenizer(
                whole.to_str(), n_vocab=max(vocab, known), eos_token=ends or None
            )
        except ValueError as error:
            raise ModelError(f"no grammar can use this tokenizer: {error}") from error

    def start(self, kind: FormatKind, source: str, generated: Sequence[int] = ()) -> OutputGrammar:
        """Return the grammar after the `generated` ids.

        Raises CallerError if they do not match it.
        """
        return self._started(_grammar(kind, source), generated)

    def start_calls(
        self, tools: ToolUse, generated: Sequence[int] = (), answer: OutputFormat | None = None
    ) -> OutputGrammar:
        """Return the grammar of a run that must call tools, or else `answer` in that format."""
        functions = read_functions(tools.functions)
        wanted = [each for each in functions if tools.only in (None, each["name"])]
        return self._started(_calls(wanted, tools, answer, self._special), generated)

    def _started(self, grammar_text: str, generated: Sequence[int]) -> OutputGrammar:
        matcher = LLMatcher(self._tokenizer, grammar_text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        # If none of our end-of-text ids is a token, llguidance chooses another token as the end.
        not_ours = frozenset(self._tokenizer.eos_tokens) - self._eos_ids
        grammar = OutputGrammar(matcher, self._vocab, self._eos_ids, not_ours)
        for token in generated:
            grammar.accept(token)
        return grammar


class OutputGrammar:
    """The ids that one run may draw next.

    For a run with a format the engine does three things. It ends the run as `stop`, without a draw,
    as soon as `finished` is True. It draws under `mask()`, or with drafts under the first masks of
    `draft_masks(drafts)`. It gives each token that it takes to `accept`.

    Every method raises CallerError (field `format`) when the grammar cannot continue, because it
    has become too complex or the tokenizer has no suitable token; the run has then failed with that
    message. Steered text would break the grammar, so a run with a format accepts none.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab: int,
        eos_ids: frozenset[int],
        forbidden: frozenset[int] = frozenset(),
    ) -> None:
        self._matcher = matcher
        self._forbidden = [token for token in forbidden if token < vocab]
        self._words = -(-vocab // MASK_BITS)
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._ended = False

    @property
    def may_end(self) -> bool:
        """True if the text so far matches the format, so that end-of-text ids are allowed."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """True if only the end can follow."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> Mask:
        """Return the ids that may be drawn next: int32 [ceil(vocab / 32)], a new array each time.

        Bit i of word w allows id 32 w + i, as kernels.sampler reads it; at least one is set.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        mask = bits[: self._words].copy()
        if self._vocab % MASK_BITS:
            mask.view(np.uint32)[-1] &= np.uint32((1 << self._vocab % MASK_BITS) - 1)
        for token in self._eos_ids:  # llguidance knows no end-of-text ids outside the tokenizer
            _allow(mask, token, self.may_end)
        for token in self._forbidden:
            _allow(mask, token, False)
        if not mask.any():
            raise _refusal("no token of the model can continue the text", "format_stuck")
        return mask

    def accept(self, token: int) -> None:
        """Advance by `token`, which a mask has allowed."""
        if self._ended:
            raise _refusal(f"token {token} follows the end of the format", "format_broken")
        if token in self._eos_ids and self.may_end:
            self._ended = True
            return
        if not self._matcher.consume_token(token):
            self._check()

    def draft_masks(self, drafts: Sequence[int]) -> list[Mask]:
        """Return the masks of the next token and of those after each draft, while the drafts match.

        There are 1 + n masks, where n is how many drafts the grammar allows and can follow: the
        engine verifies only the first n. The grammar's state does not change.
        """
        masks = [self.mask()]
        taken = 0
        for token in drafts:
            if token in self._eos_ids or self._matcher.validate_tokens([token]) == 0:
                break
            self._matcher.consume_token(token)
            taken += 1
            if self._matcher.is_stopped():
                break
            masks.append(self.mask())
        if taken and not self._matcher.rollback(taken):
            self._check()
        return masks

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error(), "format_broken")


def _allow(mask: Mask, token: int, is_allowed: bool) -> None:
    words = mask.view(np.uint32)
    word, bit = token // MASK_BITS, np.uint32(1 << token % MASK_BITS)
    words[word] = words[word] | bit if is_allowed else words[word] & ~bit


def _grammar(kind: FormatKind, source: str) -> str:
    """Return the grammar of a format, as llguidance's text.

    Raises CallerError if a schema is not JSON, or the format is too costly.
    """
    if kind is FormatKind.REGEX:
        if size_of(source) > MAX_REGEX_BYTES:
            why = f"the regular expression is longer than {MAX_REGEX_BYTES} bytes"
            raise _refusal(why, "format_too_costly")
        return LLMatcher.grammar_from_regex(source)
    try:
        schema = _guided(json.loads(source, parse_constant=_refuse_constant))
        # Serialised again, because llguidance pastes a schema's text into its own JSON.
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except (ValueError, RecursionError) as error:
        raise _no_json(error) from error


def _guided(schema: Any) -> Any:
    """Return a schema that sets how its JSON is written. Raises CallerError if it is too costly.

    A schema that admission has stored sets this itself. A schema that an earlier version stored
    keeps the white space of that version, so that its stream can continue.
    """
    if (costly := why_costly(schema)) is not None:
        raise _refusal(costly, "format_too_costly")
    if schema is True:
        schema = {}
    if isinstance(schema, dict) and GUIDANCE not in schema:
        schema[GUIDANCE] = {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_SPACES}}}"}
    return schema


def _calls(
    functions: Sequence[dict[str, Any]],
    tools: ToolUse,
    answer: OutputFormat | None = None,
    special: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Return the grammar, as llguidance's text, of calls of these functions in the model's markup.

    With `answer`, the run may give an answer in that format instead.

    special: ids of the special tokens by name; the marks around calls may be special tokens.
    """
    assert tools.markup is not None  # checked by the caller: without a markup there is no grammar
    markup = MARKUPS[tools.markup]
    begins, ends = (_mark(mark, special) for mark in (markup.begins, markup.ends))
    # The texts `first` and `last` are around all calls, `before` and `after` around each call.
    first, last, between = "", "", "; "
    before, after = "", ""
    if ends:
        before, after, between = f'{begins} "\\n"', f'"\\n" {ends}', "\n"
    elif begins:
        first, last, between = f'{begins} " "? "["', '"]"', ", "
    more = f" ({json.dumps(between)} call)*" if tools.parallel else ""
    rules = [
        "start: calls" + ("" if answer is None else " | answer"),
        f"calls: {first} call{more} {last}",
        "call: " + " | ".join(f"call{nth}" for nth in range(len(functions))),
    ]
    for nth, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{markup.arguments}": '
        rules += [
            f'call{nth}: {before} {json.dumps(head)} arguments{nth} "}}" {after}',
            f"arguments{nth}: %json {json.dumps(_guided(function['parameters']))}",
        ]
    if answer is not None:
        rules += _answer(answer, markup)
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _mark(mark: str, special: Mapping[str, int]) -> str:
    return f"<[{special[mark]}]>" if mark in special else mark and json.dumps(mark)


def _answer(answer: OutputFormat, markup: Markup) -> list[str]:
    """Return the grammar's rules for an answer in the format `answer`.

    Text that would be read as a call is excluded.
    """
    if answer.kind is not FormatKind.REGEX:
        return [f"answer: %json {json.dumps(_guided(json.loads(answer.source)))}"]
    grammar = json.loads(LLMatcher.grammar_from_regex(answer.source))["grammars"][0]
    text = grammar["lark_grammar"].removeprefix("start: ")
    call = f"(?s:.*){re.escape(markup.begins)}(?s:.*)" if markup.begins else r"\s*\{(?s:.*)"
    return ["answer: ANSWER", f"ANSWER: {text} & ~/{call}/"]


def _no_json(error: Exception) -> CallerError:
    return _refusal(f"the schema is not JSON: {error}")


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _refusal(message: str, code: str = "bad_format") -> CallerError:
    # Cut the message where llguidance appends its internal state or the surrounding grammar.
    for echo in ("\n<state>", "\n   1 | start:"):
        message = message.partition(echo)[0].strip()
    return CallerError(message[:MAX_MESSAGE_CHARS], code=code, field="format")
