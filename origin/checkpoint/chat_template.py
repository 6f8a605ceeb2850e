"""A checkpoint's chat template: from the messages of a conversation to the text of a prompt.

It is `chat_template.jinja`, or `chat_template` in tokenizer_config.json: one template, or a list of
named ones of which `default` counts. A template is code that came with the weights: it runs in
Jinja's sandbox, in a process of its own (`template_child`), on plain strings, and its size, time,
memory and output are bounded. It finds the names that templates made for transformers expect:
`raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, loop controls, `generation`
blocks, and the special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ledger.errors import ModelError
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import read_object_if_there, shown
from origin.checkpoint.template_process import TemplateProcess
from origin.checkpoint.tokenizer_file import TOKENIZER_CONFIG_FILE
from origin.tools import markup_of, shows_tools

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = 1024 * 1024
"""The longest real ones, for tools in many forms, are of about 20 kB."""

Now = Callable[[], datetime]


def utc_now() -> datetime:
    """What `strftime_now` tells, unless another clock is given."""
    return datetime.now(UTC)


class ChatTemplate:
    """One template. `special` is what it may name: `bos_token` and the like.

    `markup` is how its model calls tools, if it `shows_tools` and that is known.
    """

    def __init__(self, source: str, file: Path, special: Mapping[str, Any], now: Now) -> None:
        self._process = TemplateProcess(source, special)
        self.markup = markup_of(source)
        self.shows_tools = shows_tools(source)
        self._file = file
        self._now = now

    def examine(self, findings: Findings) -> bool:
        """Whether it can be compiled; a fault if not."""
        answer = self._process.compile()
        if not answer:
            return True
        key, line = ("line", " ") if self._file.name == TEMPLATE_FILE else ("chat_template", ":")
        where = f"{key}{line}{answer['line']}" if "line" in answer else "chat_template"
        findings.fault(self._file, where, answer["problem"])
        return False

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises TemplateError for a conversation that the template refuses, ModelError for a
        fault of the template itself. It takes a tenth of a millisecond, and where the template
        is such as to run without end, a second: not on the event loop.
        """
        turns = [dict(message) for message in messages]
        answer = self._process.render(turns, tools, self._now().isoformat())
        if "refused" in answer:
            raise TemplateError(answer["refused"])
        if "failed" in answer:
            file = str(self._file)
            raise ModelError(f"the chat template fails: {answer['failed']}", field=file)
        text: str = answer["text"]
        return text


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
    template = ChatTemplate(source, file, special_tokens(fallback | config), now)
    return template if template.examine(findings) else None


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
