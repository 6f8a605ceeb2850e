"""A checkpoint's chat template: from the messages of a conversation to the text of a prompt.

It is `chat_template.jinja`, or `chat_template` in tokenizer_config.json: one template, or a list of
named ones of which `default` counts. A template is code that came with the weights: it runs in
Jinja's sandbox, in a process of its own (`template_child`), on plain strings, and its size, time,
memory and output are bounded. It finds the names that templates made for transformers expect:
`raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, loop controls, `generation`
blocks, and the special tokens.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ledger.errors import ModelError
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import read_object_if_there, shown
from origin.checkpoint.template_child import MAX_CPU_S, Answer
from origin.checkpoint.tokenizer_file import TOKENIZER_CONFIG_FILE
from origin.children import import_environment
from origin.tools import markup_of, shows_tools

COMMAND = (sys.executable, "-P", "-m", "origin.checkpoint.template_child")
PATIENCE_S = 30.0
"""Of a clock, for a start or an answer on a machine that has no processor to spare."""
READ_BYTES = 1 << 16


class TemplateProcess:
    """Asks a child that is started for the first question, and anew after one has ended.

    Any thread may ask, and waits until it is its turn, and for the answer.
    """

    def __init__(self, template: str, special: Mapping[str, Any]) -> None:
        self._first = {"template": template, "special": dict(special)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def compile(self) -> Answer:
        """Empty, or with a `problem`."""
        with self._lock:
            return self._start()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, now: str
    ) -> Answer:
        """With `text`, `refused` or `failed`."""
        with self._lock:
            if self._child is None and (problem := self._start().get("problem")):
                return {"failed": problem}
            return self._ask({"messages": messages, "tools": tools, "now": now}, "failed")

    def _start(self) -> Answer:
        self._child = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=import_environment()
        )
        self._end = weakref.finalize(self, _end, self._child)
        answer = self._ask(self._first, "problem")
        if answer:
            self._stop()
        return answer

    def _ask(self, question: Mapping[str, Any], otherwise: str) -> Answer:
        """The answer, or why there is none, as what it is `otherwise`."""
        assert self._child is not None
        try:
            return _exchange(self._child, json.dumps(question).encode())
        except TimeoutError:
            reason = f"it gave no answer for {PATIENCE_S:g} s"
        except (BrokenPipeError, EOFError):
            status = self._child.wait()
            reason = f"its process ended with {status}"
            if status == -signal.SIGPROF:
                reason = f"it takes more than {MAX_CPU_S:g} s of processor time"
        self._stop()
        return {otherwise: reason}

    def _stop(self) -> None:
        self._end()
        self._child = None


def _exchange(child: subprocess.Popen[bytes], question: bytes) -> Answer:
    """Raises BrokenPipeError or EOFError for a child that ends, TimeoutError for a silent one."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(question + b"\n")
    child.stdin.flush()
    ready = select.poll()  # select() knows no descriptor above 1023
    ready.register(child.stdout, select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    pieces = [b""]
    while not pieces[-1].endswith(b"\n"):
        if not ready.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
        pieces.append(os.read(child.stdout.fileno(), READ_BYTES))
        if not pieces[-1]:
            raise EOFError
    answer: Answer = json.loads(b"".join(pieces))
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with suppress(BrokenPipeError), child:  # closes its pipes, and waits for it
        pass


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
