"""From a request's text to prompt token ids: tokenizer and chat template, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ledger.errors import CallerError, ModelError, TooLarge
from ledger.frame import Message

ROLES = ("system", "user", "assistant")


class PromptReader:
    """The text side of one checkpoint folder: what the supervisor needs to admit a request."""

    def __init__(self, directory: Path) -> None:
        config = _json(directory / "config.json")
        defaults = _json_or_empty(directory / "generation_config.json")
        tokenizer_config = _json_or_empty(directory / "tokenizer_config.json")
        self.context = _number(config, "max_position_embeddings", directory / "config.json")
        self.temperature = float(defaults.get("temperature", 1.0))
        self.top_k = int(defaults.get("top_k", 0))
        self.top_p = float(defaults.get("top_p", 1.0))
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises no narrower one
            raise ModelError(f"{directory / 'tokenizer.json'}: {error}") from error
        self._template = _template(tokenizer_config)
        longest = max(len(word) for word in self._tokenizer.get_vocab())
        self._max_prompt_chars = self.context * longest

    def ids(self, prompt: str | None, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt or of a conversation; raises `CallerError` naming the field."""
        field = "prompt" if prompt is not None else "messages"
        text = prompt if prompt is not None else self._render(messages)
        if len(text) > self._max_prompt_chars:
            raise TooLarge(
                f"{len(text)} characters cannot fit the context of {self.context} tokens",
                code="prompt_too_long",
                status=400,
                field=field,
                hint="send a shorter prompt",
            )
        # A chat template writes the special tokens of a conversation itself.
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=prompt is not None).ids)
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

    def _render(self, messages: Sequence[Message]) -> str:
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
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._template.render(messages=turns, add_generation_prompt=True))
        except TemplateError as error:
            raise CallerError(f"the chat template refuses: {error}", field="messages") from error


def _template(tokenizer_config: dict[str, Any]) -> Any:
    source = tokenizer_config.get("chat_template")
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {
        name: token if isinstance(token, str) else token.get("content", "")
        for name in ("bos_token", "eos_token")
        if (token := tokenizer_config.get(name)) is not None
    }
    return environment.from_string(source, globals=special)


def _json_or_empty(path: Path) -> dict[str, Any]:
    return _json(path) if path.exists() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}", hint="give a checkpoint folder") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: not a JSON object")
    return loaded


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} must be a positive whole number", field=key)
    return value
