"""A checkpoint's chat template: from the messages of a conversation to the text of a prompt.

It is `chat_template.jinja`, or `chat_template` in tokenizer_config.json: one template, or a list of
named ones of which `default` counts. A template is code that came with the weights: it runs in
Jinja's sandbox, on plain strings, and its size and that of its output are bounded. It finds the
names that templates made for transformers expect: `raise_exception`, `strftime_now`, a `tojson`
that leaves HTML alone, loop controls, `generation` blocks, and the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ledger.errors import ModelError
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import read_object_if_there, shown
from origin.checkpoint.tokenizer_file import TOKENIZER_CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = 1024 * 1024
"""The longest real ones, for tools in many forms, are of about 20 kB."""
MAX_ADDED_CHARS = 4 * 1024 * 1024
"""What a template may write beside the messages themselves; it ends one that never stops."""

Now = Callable[[], datetime]
# What a template can do wrong by itself, beside what Jinja says of it.
FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def utc_now() -> datetime:
    """What `strftime_now` tells, unless another clock is given."""
    return datetime.now(UTC)


class GenerationBlocks(Extension):
    """`{% generation %}` marks what a model is trained to say; here it is text as any other."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One template, parsed. `special` is what it may name: `bos_token` and the like."""

    def __init__(self, source: str, file: Path, special: Mapping[str, Any], now: Now) -> None:
        """Raises TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        names = {"raise_exception": _raise, "strftime_now": lambda form: now().strftime(form)}
        self._template = environment.from_string(source, globals={**special, **names})
        self._file = file

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises TemplateError for a conversation that the template refuses, ModelError for a
        fault of the template itself.
        """
        given = {"messages": list(messages), "tools": None, "documents": None}
        left = MAX_ADDED_CHARS + sum(len(text) for turn in messages for text in turn.values())
        pieces: list[str] = []
        try:
            for piece in self._template.generate(**given, add_generation_prompt=True):
                left -= len(piece)
                if left < 0:
                    raise ValueError(f"it adds more than {MAX_ADDED_CHARS} characters")
                pieces.append(piece)
        except FAULTS as exc:
            raise ModelError(f"the chat template fails: {exc}", field=str(self._file)) from exc
        return "".join(pieces)


def load_template(directory: Path, now: Now = utc_now) -> ChatTemplate | None:
    """The template of a checkpoint, if it has one; ModelError, with file and line, if it is bad."""
    findings = Findings()
    template = examine_template(directory, findings, now)
    findings.refuse()
    return template


def examine_template(
    directory: Path, findings: Findings, now: Now = utc_now
) -> ChatTemplate | None:
    """As `load_template`, with what is wrong as findings."""
    config = read_object_if_there(directory / TOKENIZER_CONFIG_FILE, findings)
    file, source = _source(directory, config, findings)
    if source is None:
        return None
    if len(source.encode()) > MAX_TEMPLATE_BYTES:
        findings.fault(file, "chat_template", f"is longer than {MAX_TEMPLATE_BYTES} bytes")
        return None
    fallback = read_object_if_there(directory / SPECIAL_TOKENS_FILE, findings)
    try:
        return ChatTemplate(source, file, special_tokens(fallback | config), now)
    except TemplateSyntaxError as exc:
        where = (
            f"line {exc.lineno}" if file.name == TEMPLATE_FILE else f"chat_template:{exc.lineno}"
        )
        findings.fault(file, where, f"does not parse: {exc.message}")
        return None


def special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token` and the like by name, as text, and `additional_special_tokens` as a list."""
    named = {key: _text(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {key: _text(value) for key, value in extra.items()}
    found: dict[str, Any] = {key: text for key, text in named.items() if text is not None}
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        found["additional_special_tokens"] = [text for item in more if (text := _text(item))]
    return found


def _text(token: object) -> str | None:
    """A token as it is written: plain, or as an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _source(
    directory: Path, config: Mapping[str, Any], findings: Findings
) -> tuple[Path, str | None]:
    """(file, template); a file of its own goes first, as in transformers."""
    own = directory / TEMPLATE_FILE
    try:
        if own.exists():
            return own, own.read_text("utf-8")
    except (OSError, ValueError) as exc:
        findings.fault(own, "", f"cannot be read: {exc}")
        return own, None
    file, value = directory / TOKENIZER_CONFIG_FILE, config.get("chat_template")
    if isinstance(value, list):
        value = _default_of(value)
    if value is not None and not isinstance(value, str):
        right = "a template, or a list of named ones with one named default"
        findings.fault(file, "chat_template", shown(value), right)
        return file, None
    return file, value


def _default_of(named: list[Any]) -> Any:
    """The template named `default`, or the only one; otherwise the list itself."""
    items = [item for item in named if isinstance(item, dict)]
    if len(items) == 1:
        return items[0].get("template", named)
    return next((item.get("template") for item in items if item.get("name") == "default"), named)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what is special in HTML; prompts are no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
