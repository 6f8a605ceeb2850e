"""From a request's text to prompt token ids: tokenizer and chat template, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer

from ledger.errors import CallerError, TooLarge
from ledger.frame import Message, Sampling
from origin.checkpoint.chat_template import Now, load_template, utc_now
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_config import CONFIG_FILE, GENERATION_FILE
from origin.checkpoint.model_json import JsonObject, read_object, read_object_if_there
from origin.checkpoint.tokenizer_file import load_tokenizer
from origin.tools import MarkupName, read_calls

ROLES = ("system", "user", "assistant", "tool")


Functions = Sequence[dict[str, Any]]
"""What a model may call: `name`, `description`, `parameters`."""


class Prompt(NamedTuple):
    """Token ids, and how many messages were dropped to make room."""

    ids: tuple[int, ...]
    dropped: int


class PromptReader:
    """The text side of one checkpoint folder: what the supervisor needs to admit a request."""

    def __init__(self, directory: Path, now: Now = utc_now) -> None:
        """`now` is the clock that a chat template may ask for the date."""
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

    def markup(self, *, forced: bool) -> MarkupName:
        """How calls of tools are written; any model can be forced, and few call by themselves.

        Raises CallerError for a model that cannot.
        """
        template = self._template
        if template is not None and template.markup is not None:
            return template.markup
        if forced and (template is None or not template.shows_tools):
            return "hermes"
        raise CallerError(
            "this model was not trained to call tools, or in a form that is not known here",
            code="unsupported",
            field="tools",
            hint='"tool_choice": "required" makes it, as well as it can',
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


MARK = "\ufdd0"
"""A noncharacter: for use inside a process, never in text that is exchanged (Unicode 23.7)."""


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
