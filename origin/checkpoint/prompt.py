"""Turns a request's prompt or messages into token ids, with tokenizer and chat template; no torch.

A chat template is code that comes with the weights. It runs in Jinja's sandbox in its own process
(`template_child`) on plain strings, with limits on its size, time, memory and output.
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

from tailrace.ledger.errors import CallerError, Conflict, ModelError, TooLarge
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
ANSWER_TIMEOUT_S = 30.0
"""Timeout in seconds for the start of the process, and for each of its answers."""
READ_BYTES = 1 << 16

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = 1024 * 1024
"""Maximum size of a chat template in bytes; the longest real ones have about 20 kB."""
Now = Callable[[], datetime]
ROLES = ("system", "user", "assistant", "tool")
Functions = Sequence[dict[str, Any]]
"""Functions that a model may call, each a dict with `name`, `description` and `parameters`."""
_ANSWER = "ANSWER-5f2b9c"
"""Placeholder for the model's answer. A conversation with it is rendered to find the text that the
template writes after an answer."""
MARK = "\ufdd0"
"""Character that marks special tokens. It is a noncharacter of Unicode, which valid texts do not
contain (Unicode 23.7)."""


class TemplateProcess:
    """Compiles and renders a template in a child process, which is restarted after it has ended.

    Any thread may call the methods. They block while another call is in progress, and until the
    child answers.
    """

    def __init__(self, template: str, special: Mapping[str, Any]) -> None:
        self._first = {"template": template, "special": dict(special)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def compile(self) -> Answer:
        """Compile the template; the answer is empty, or has a `problem` if that failed."""
        with self._lock:
            return self._start()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, now: str
    ) -> Answer:
        """Render the template.

        The answer has the rendered `text`, or else the reason under `refused` or `failed`.
        """
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
        """Return the child's answer; if there is none, a dict of `otherwise` and the reason."""
        assert self._child is not None
        try:
            return _exchange(self._child, json.dumps(question).encode())
        except TimeoutError:
            reason = f"it gave no answer for {ANSWER_TIMEOUT_S:g} s"
        except (BrokenPipeError, EOFError):
            status = self._child.wait()
            reason = f"its process ended with status {status}"
            if status == -signal.SIGPROF:
                reason = f"it takes more than {MAX_CPU_S:g} s of processor time"
        self._stop()
        return {otherwise: reason}

    def _stop(self) -> None:
        self._end()
        self._child = None


def _exchange(child: subprocess.Popen[bytes], question: bytes) -> Answer:
    """Send a question, and return the answer.

    Raises:
        BrokenPipeError: The child has ended before the question.
        EOFError: The child has ended before the answer.
        TimeoutError: The child has not answered in time.
    """
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(question + b"\n")
    child.stdin.flush()
    ready = select.poll()  # not select(), which supports no file descriptor above 1023
    ready.register(child.stdout, select.POLLIN)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
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
    with suppress(BrokenPipeError), child:  # `with` closes the child's pipes and waits for its end
        pass


def utc_now() -> datetime:
    """Return the current UTC time: the default clock of the templates' `strftime_now`."""
    return datetime.now(UTC)


class ChatTemplate:
    """The chat template of a checkpoint.

    It is `chat_template.jinja`, or `chat_template` in tokenizer_config.json, which may be a list of
    named templates; then the one named `default` is used. Templates get the names that transformers
    gives them: `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, loop controls,
    `generation` blocks, and the special tokens (`special`: `bos_token` and the like).

    Attributes:
        shows_tools: True if the template passes tools to the model.
        markup: How the model calls tools; None if that is not known.
    """

    def __init__(self, source: str, file: Path, special: Mapping[str, Any], now: Now) -> None:
        self._process = TemplateProcess(source, special)
        self.markup = markup_of(source)
        self.shows_tools = shows_tools(source)
        self._file = file
        self._now = now

    def examine(self, findings: Findings) -> bool:
        """Compile the template; return True on success, or else add a fault."""
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
        """Return the prompt up to where the assistant's answer begins.

        The call blocks: usually for a tenth of a millisecond, but with a template that never ends
        for MAX_CPU_S of CPU time. So it must not run on the event loop.

        Raises:
            TemplateError: The template refuses the conversation.
            ModelError: The template has a fault.
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
    """Return the template of a checkpoint, or None if it has none.

    Raises:
        ModelError: The template does not compile; the error names file and line.
    """
    findings = Findings()
    template = examine_template(directory, findings, now)
    findings.refuse()
    return template


def examine_template(
    directory: Path, findings: Findings, now: Now = utc_now
) -> ChatTemplate | None:
    """Return the template of a checkpoint, or None; faults become findings."""
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
    """Return the texts of special tokens by name, and `additional_special_tokens` as a list."""
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
    """Return the text of a token, which is a string or an object with flags; else None."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _source(
    directory: Path, config: Mapping[str, Any], findings: Findings
) -> tuple[Path, str | None]:
    """Return (file, template); `chat_template.jinja` takes precedence, as in transformers."""
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
    """Return the template to use of a list of named templates.

    It is the only template of the list, or the one named `default`. If there is neither, the list
    itself is returned.
    """
    items = [item for item in named if isinstance(item, dict)]
    if len(items) == 1:
        return items[0].get("template", named)
    return next((item.get("template") for item in items if item.get("name") == "default"), named)


class Prompt(NamedTuple):
    """Token ids, and the number of messages that were dropped to fit the context."""

    ids: tuple[int, ...]
    dropped: int


class PromptReader:
    """Turns requests into prompts, with tokenizer, chat template and limits of one checkpoint."""

    def __init__(self, directory: Path, now: Now = utc_now, *, open_objects: bool = False) -> None:
        """Read the files of a checkpoint.

        Args:
            directory: The folder of the checkpoint.
            now: The clock for templates that write the date.
            open_objects: If True, objects of JSON schemas may have members that are not listed.

        Raises:
            ModelError: A file is missing or has a fault.
        """
        self.open_objects = open_objects
        findings = Findings()
        path, defaults_path = directory / CONFIG_FILE, directory / GENERATION_FILE
        config = JsonObject(path, read_object(path, findings) or {}, findings)
        given = read_object_if_there(defaults_path, findings)
        defaults = JsonObject(defaults_path, given, findings)
        self.context = config.count("max_position_embeddings")
        # Defaults for requests; as in transformers, do_sample false selects the likeliest token.
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
        """Return the token ids of a prompt or of a conversation.

        Raises:
            CallerError: The prompt is missing, does not fit, or is refused by the template. The
                error names the field.
        """
        field = "prompt" if prompt is not None else "messages"
        text = prompt if prompt is not None else self._render(messages, functions)
        self._check_chars(text, field)
        # The tokenizer adds special tokens to a plain prompt only; a chat template writes them
        # itself.
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
        """Return the markup in which the model writes tool calls; None if it makes no calls.

        If the template ignores tools, the model is made to call them only if `forced` is True.

        Raises:
            CallerError: The template passes tools to the model in an unknown markup.
        """
        template = self._template
        if template is None or not template.shows_tools:
            return "hermes" if forced else None
        if template.markup is not None:
            return template.markup
        raise CallerError(
            "tool calls of this model are not supported: its chat template has an unknown markup",
            code="unsupported",
            field="tools",
            hint='send no tools, or "tool_choice": "none"',
        )

    def read(
        self,
        prompt: str | None,
        messages: Sequence[Message],
        room: int | None = None,
        functions: Functions = (),
    ) -> Prompt:
        """Return the prompt of a request; old messages of a conversation may be dropped.

        If `room` is given, the oldest turns are dropped until `room` tokens are left for the
        answer, or until only the last turn of the user is left. System messages always stay.
        """
        cuts = _cuts(messages) if room is not None else [0]
        # The later a conversation is cut, the fewer messages are left. So bisection finds the first
        # cut whose messages fit.
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
        """Return the text of token ids, special tokens included."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def steer_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that is inserted into a generation.

        Special tokens in the text become plain letters.
        """
        self._check_chars(text, "text")
        return tuple(self._quoted.encode(self._quoted.mark(text)))

    def turn_ids(self, instruction: str) -> tuple[int, ...]:
        """Return the token ids that come between an answer and the answer to a next message.

        These are the end of the first answer, the user's message, and the beginning of the next
        answer, as the chat template writes them.

        Raises:
            TooLarge: The message does not fit into the context.
            Conflict: The chat template shows no conversations of several turns.
        """
        self._check_chars(instruction, "instruction")
        conversation = ("user", "?"), ("assistant", _ANSWER), ("user", instruction)
        try:
            text = self._render([Message(role, content) for role, content in conversation], ())
        except CallerError as error:
            raise _no_turns(error.message) from error
        _, answer, turns = text.partition(_ANSWER)
        if not answer or not turns:
            raise _no_turns("the chat template does not show earlier answers")
        return tuple(self._quoted.encode(turns))

    def _leaves(self, messages: Sequence[Message], room: int, functions: Functions) -> bool:
        try:
            return len(self.ids(None, messages, functions)) <= self.context - room
        except TooLarge:
            return False

    def _check_chars(self, text: str, field: str) -> None:
        if len(text) > self._max_prompt_chars:
            raise TooLarge(
                f"{len(text)} characters do not fit into the context of {self.context} tokens",
                code="prompt_too_long",
                status=400,
                field=field,
                hint=f"send at most {self._max_prompt_chars} characters",
            )

    def _render(self, messages: Sequence[Message], functions: Functions) -> str:
        if self._template is None:
            raise CallerError(
                "this model has no chat template", field="messages", hint="send `prompt` instead"
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
            raise CallerError(
                f"the chat template refuses the conversation: {error}", field="messages"
            ) from error

    def _marked(self, value: Any) -> Any:
        """Return a copy of `value` in which special tokens in all texts are marked."""
        if isinstance(value, str):
            return self._quoted.mark(value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if isinstance(value, dict):
            return {self._quoted.mark(key): self._marked(item) for key, item in value.items()}
        return value


def _no_turns(why: str) -> Conflict:
    return Conflict(
        f"no instruction can follow an answer of this model: {why}",
        code="unsupported",
        field="instruction",
        hint="give text, or begin a new stream",
    )


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    The arguments of tool calls are objects, and the answer to a call has the function's name.
    """
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
        arguments = call["arguments"]  # a model may have written malformed JSON
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _cuts(messages: Sequence[Message]) -> list[int]:
    """Return the indexes of messages before which a conversation may be cut.

    They are 0 and those of later user turns. So a cut conversation begins with a user turn, and its
    roles still alternate.
    """
    first = next((at for at, message in enumerate(messages) if message.role != "system"), 0)
    later = (at for at in range(first + 1, len(messages)) if messages[at].role == "user")
    return [0, *later]


def _after(messages: Sequence[Message], cut: int) -> list[Message]:
    """Return the system messages before `cut`, and all messages from `cut` on."""
    return [message for message in messages[:cut] if message.role == "system"] + [*messages[cut:]]


class QuotedTokens:
    """Encodes special tokens inside messages as plain letters, against prompt injection.

    A chat template writes special tokens as text, in which the tokenizer recognizes them. It would
    also recognize a special token inside a message, which could end the message or begin a system
    message. To prevent this, each special token in a message is marked before the template runs.
    The template copies the marks with the text, and they are removed before the tokenizer runs.
    Each marked token in its result is then replaced by the ids of the token's letters.

    One case is not covered: a template that cuts text out of the middle of a message, so that the
    rest forms a special token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._texts = {at: token.content for at, token in added.items() if token.special}
        self._letters = {at: self._as_letters(text) for at, text in self._texts.items()}
        longest_first = sorted(self._texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, content: str) -> str:
        """Return a message's content with MARK before each special token and nowhere else."""
        return self._pattern.sub(lambda found: MARK + found[0], content.replace(MARK, ""))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt; special tokens after a MARK become letters."""
        if MARK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        marked, plain = _without_marks(text)
        encoding = self._tokenizer.encode(plain, add_special_tokens=False)
        ids: list[int] = []
        for at, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The tokenizer may count the spaces around a special token as part of it.
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
    """Remove every MARK from a rendered prompt.

    Return the positions in the remaining text that were preceded by a MARK, and that text.
    """
    pieces = text.split(MARK)
    at, places = 0, set()
    for piece in pieces[:-1]:
        at += len(piece)
        places.add(at)
    return places, "".join(pieces)
