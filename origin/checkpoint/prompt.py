"""From a request's text to prompt token ids: tokenizer and chat template, no torch.

A chat template is code that came with the weights: it runs in Jinja's sandbox, in a process of its
own (`template_child`), on plain strings, and its size, time, memory and output are bounded.
"""

from __future__ import annotations

import json
import os
import re
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
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer

from tailrace.ledger.errors import CallerError, ModelError, TooLarge
from tailrace.ledger.frame import Message, Sampling
from tailrace.ledger.process.lifecycle import import_environment
from tailrace.origin.checkpoint.finding import (
    Findings,
    JsonObject,
    read_object,
    read_object_if_there,
    shown,
)
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, GENERATION_FILE
from tailrace.origin.checkpoint.template_child import MAX_CPU_S, Answer
from tailrace.origin.checkpoint.tokenizer_file import TOKENIZER_CONFIG_FILE, load_tokenizer
from tailrace.origin.tool_calls import MarkupName, markup_of, read_calls, shows_tools

COMMAND = (sys.executable, "-P", "-m", "tailrace.origin.checkpoint.template_child")
PATIENCE_S = 30.0
"""Of a clock, for a start or an answer on a machine that has no processor to spare."""
READ_BYTES = 1 << 16

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = 1024 * 1024
"""The longest real ones, for tools in many forms, are of about 20 kB."""
Now = Callable[[], datetime]
ROLES = ("system", "user", "assistant", "tool")
Functions = Sequence[dict[str, Any]]
"""What a model may call: `name`, `description`, `parameters`."""
MARK = "\ufdd0"
"""A noncharacter: for use inside a process, never in text that is exchanged (Unicode 23.7)."""


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


def utc_now() -> datetime:
    """What `strftime_now` tells, unless another clock is given."""
    return datetime.now(UTC)


class ChatTemplate:
    """One template: `chat_template.jinja`, or `chat_template` in tokenizer_config.json, which may
    be a list of named ones of which `default` counts. It finds the names that templates made
    for transformers expect: `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone,
    loop controls, `generation` blocks, and the special tokens.

    `special` is what it may name: `bos_token` and the like.

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


class Prompt(NamedTuple):
    """Token ids, and how many messages were dropped to make room."""

    ids: tuple[int, ...]
    dropped: int


class PromptReader:
    """The text side of one checkpoint folder: what the supervisor needs to admit a request."""

    def __init__(self, directory: Path, now: Now = utc_now, *, open_objects: bool = False) -> None:
        """`now` is the clock that a chat template may ask for the date.

        `open_objects`: requests for this model get JSON schemas as they are, none closed.
        """
        self.open_objects = open_objects
        findings = Findings()
        path, defaults_path = directory / CONFIG_FILE, directory / GENERATION_FILE
        config = JsonObject(path, read_object(path, findings) or {}, findings)
        given = read_object_if_there(defaults_path, findings)
        defaults = JsonObject(defaults_path, given, findings)
        self.context = config.count("max_position_embeddings")
        # What a request leaves open; transformers takes the likeliest token where it may not draw.
        temperature = defaults.not_negative("temperature", 1.0)
        self.defaults = Sampling(
            temperature=temperature if defaults.flag("do_sample", default=True) else 0.0,
            top_k=defaults.count("top_k", 0, least=0),
            top_p=defaults.number("top_p", 1.0, most=1.0),
            min_p=defaults.not_negative("min_p", 0.0, most=1.0),
            repetition_penalty=defaults.number("repetition_penalty", 1.0),
        )
        findings.refuse()
        self._tokenizer = load_tokenizer(directory)
        self._template = load_template(directory, now)
        self._quoted = QuotedTokens(self._tokenizer)
        longest = max(len(word) for word in self._tokenizer.get_vocab())
        self._max_prompt_chars = self.context * longest

    def ids(
        self, prompt: str | None, messages: Sequence[Message], functions: Functions = ()
    ) -> tuple[int, ...]:
        """Token ids of a prompt or of a conversation; raises `CallerError` naming the field."""
        field = "prompt" if prompt is not None else "messages"
        text = prompt if prompt is not None else self._render(messages, functions)
        self._check_chars(text, field)
        # A chat template writes the special tokens of a conversation itself.
        plain = prompt is not None
        ids = tuple(self._tokenizer.encode(text).ids if plain else self._quoted.encode(text))
        if not ids:
            raise CallerError("is empty", field=field, hint="give at least one character")
        if len(ids) >= self.context:
            raise TooLarge(
                f"{len(ids)} tokens leave no room in the context of {self.context}",
                code="prompt_too_long",
                status=400,
                field=field,
                hint=f"at most {self.context - 1} tokens",
            )
        return ids

    def markup(self, *, forced: bool) -> MarkupName | None:
        """Return how calls of tools are written.

        A model whose template shows no tools can be forced to call one, and does not by itself:
        None. Raises CallerError for a model whose template shows them in an unknown form.
        """
        template = self._template
        if template is None or not template.shows_tools:
            return "hermes" if forced else None
        if template.markup is not None:
            return template.markup
        raise CallerError(
            "this model calls tools in a form that is not known here",
            code="unsupported",
            field="tools",
            hint='leave them out, or send "tool_choice": "none"',
        )

    def read(
        self,
        prompt: str | None,
        messages: Sequence[Message],
        room: int | None = None,
        functions: Functions = (),
    ) -> Prompt:
        """The same, of a conversation that may be cut: see `Prompt.dropped`.

        With `room`, the oldest turns go until so many tokens are left for the answer, or, if
        that cannot be, until only the last turn of the user is left. What the system says stays.
        """
        cuts = _cuts(messages) if room is not None else [0]
        # Each cut leaves less than the one before, so that the first that fits is soon found.
        low, high = 0, len(cuts) - 1
        while low < high:
            middle = (low + high) // 2
            if self._leaves(_after(messages, cuts[middle]), room or 1, functions):
                high = middle
            else:
                low = middle + 1
        kept = _after(messages, cuts[low])
        return Prompt(self.ids(prompt, kept, functions), len(messages) - len(kept))

    def text(self, ids: Sequence[int]) -> str:
        """What was read, special tokens too, as far as ids can tell."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def steer_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of text for a running generation; special tokens in it stay letters."""
        self._check_chars(text, "text")
        return tuple(self._quoted.encode(self._quoted.mark(text)))

    def _leaves(self, messages: Sequence[Message], room: int, functions: Functions) -> bool:
        try:
            return len(self.ids(None, messages, functions)) <= self.context - room
        except TooLarge:
            return False

    def _check_chars(self, text: str, field: str) -> None:
        if len(text) > self._max_prompt_chars:
            raise TooLarge(
                f"{len(text)} characters cannot fit the context of {self.context} tokens",
                code="prompt_too_long",
                status=400,
                field=field,
                hint="send less",
            )

    def _render(self, messages: Sequence[Message], functions: Functions) -> str:
        if self._template is None:
            raise CallerError(
                "this model has no chat template", field="messages", hint="send prompt instead"
            )
        for at, message in enumerate(messages):
            if message.role not in ROLES:
                raise CallerError(
                    f"unknown role {message.role!r}",
                    field=f"messages[{at}].role",
                    hint="one of " + ", ".join(ROLES),
                )
        turns = self._marked(turns_of(messages))
        tools = [{"type": "function", "function": function} for function in functions]
        try:
            return self._template.render(turns, self._marked(tools) or None)
        except TemplateError as error:
            raise CallerError(f"the chat template refuses: {error}", field="messages") from error

    def _marked(self, value: Any) -> Any:
        """The same, with every text in it marked."""
        if isinstance(value, str):
            return self._quoted.mark(value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if isinstance(value, dict):
            return {self._quoted.mark(key): self._marked(item) for key, item in value.items()}
        return value


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: arguments are objects, an answer knows its function."""
    names: dict[str, str] = {}
    turns: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls is not None:
            calls = read_calls(message.tool_calls, f"messages[{at}].tool_calls")
            names |= {call["id"]: call["name"] for call in calls}
            turn["tool_calls"] = [_as_template_knows(call) for call in calls]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
            turn["name"] = names.get(message.tool_call_id, "")
        turns.append(turn)
    return turns


def _as_template_knows(call: dict[str, str]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        arguments = call["arguments"]  # a model's own JSON may be broken
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _cuts(messages: Sequence[Message]) -> list[int]:
    """Where a conversation may begin: at its start, or at a later turn of the user.

    So what is kept begins as conversations do, and roles alternate as they did.
    """
    first = next((at for at, message in enumerate(messages) if message.role != "system"), 0)
    later = (at for at in range(first + 1, len(messages)) if messages[at].role == "user")
    return [0, *later]


def _after(messages: Sequence[Message], cut: int) -> list[Message]:
    """The messages from `cut` on, and what the system said before."""
    return [message for message in messages[:cut] if message.role == "system"] + [*messages[cut:]]


class QuotedTokens:
    """The special tokens of one tokenizer: those inside a message stay the letters that they are.

    A chat template writes the special tokens of a conversation itself, as text, and the tokenizer
    finds them in that text. One that stands in a message would be found as well, and end the
    message or begin another in the system's name. So every one in a message is marked before the
    template runs, and what the tokenizer then finds behind a mark is replaced by the ids of its
    letters. The marks pass through the template with the text around them, whatever it trims or
    splits; the tokenizer never sees them. What is not seen is a special token that a template
    itself puts together, by cutting a piece out of the middle of a message.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._texts = {at: token.content for at, token in added.items() if token.special}
        self._letters = {at: self._as_letters(text) for at, text in self._texts.items()}
        longest_first = sorted(self._texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, content: str) -> str:
        """A message's content with MARK before each special token in it, and no other MARK."""
        return self._pattern.sub(lambda found: MARK + found[0], content.replace(MARK, ""))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt; special tokens behind a MARK as their letters."""
        if MARK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        marked, plain = _without_marks(text)
        encoding = self._tokenizer.encode(plain, add_special_tokens=False)
        ids: list[int] = []
        for at, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A token may take the spaces around it with it.
            begins = start + max(plain[start:end].find(self._texts.get(at, "")), 0)
            quoted = at in self._texts and begins in marked
            ids.extend(self._letters[at] if quoted else [at])
        return ids

    def _as_letters(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        finally:
            self._tokenizer.encode_special_tokens = False


def _without_marks(text: str) -> tuple[set[int], str]:
    """(where in the text without marks each of them stood, that text)."""
    pieces = text.split(MARK)
    at, places = 0, set()
    for piece in pieces[:-1]:
        at += len(piece)
        places.add(at)
    return places, "".join(pieces)
