"""What an OpenAI-compatible server is asked for: a request of ours, or the rest of one.

A continuation hands the server what was delivered, to go on from:

- a plain prompt: the prompt with the delivered text behind it, which every server understands;
- a chat: the delivered text as the assistant's last message, with `add_generation_prompt: false`
  and `continue_final_message: true`. vLLM and SGLang go on with the message then; llama.cpp and
  Ollama do so by themselves and ignore the fields. A server that refuses them (`transformers
  serve` does) lets the stream end as lost, and one that ignores both them and the position
  of the message, such as OpenAI's own, begins another answer: use `upstream_lost = "end"` there.

Only what the caller asked for is sent: servers refuse fields that they do not know.
"""

from __future__ import annotations

import json
from typing import Any

from ledger.frame import SAMPLING
from origin.generations.admission import ALL_THERE_IS
from origin.generations.recipe import Recipe
from origin.tools import read_calls, read_functions

MAX_SEED = 2**31 - 1
"""Of the 64 bits of our seeds, servers take so much: some keep them in 32 bits with a sign."""

Body = dict[str, Any]


def path_of(recipe: Recipe) -> str:
    """Where the request goes, below the server's /v1."""
    return "chat/completions" if recipe.messages else "completions"


def body_of(recipe: Recipe, model: str, delivered: str, made: int) -> Body:
    """The JSON of a request that goes on after `delivered`, in which `made` tokens went."""
    body: Body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": recipe.sampling.temperature,
        "seed": (recipe.sampling.seed or 0) & MAX_SEED,
        **_source(recipe, delivered),
        **_extras(recipe),
        **_tools(recipe),
    }
    if recipe.max_tokens < ALL_THERE_IS:  # else the server knows its context
        body["max_tokens"] = recipe.max_tokens - made
    return body


def _source(recipe: Recipe, delivered: str) -> Body:
    if not recipe.messages:
        return {"prompt": (recipe.prompt or "") + delivered}
    messages = [_message(*turn) for turn in recipe.messages]
    if not delivered:
        return {"messages": messages}
    return {
        "messages": [*messages, {"role": "assistant", "content": delivered}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def _message(
    role: str | None, content: str | None, calls: str | None = None, answers: str | None = None
) -> Body:
    message: Body = {"role": role, "content": content}
    if calls is not None:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in read_calls(calls, "messages")
        ]
    if answers is not None:
        message["tool_call_id"] = answers
    return message


def _tools(recipe: Recipe) -> Body:
    tools = recipe.tools
    if tools is None:
        return {}
    functions = read_functions(tools.functions)
    choice: object = tools.choice
    if tools.only is not None:
        choice = {"type": "function", "function": {"name": tools.only}}
    body: Body = {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
    }
    return body if tools.parallel else body | {"parallel_tool_calls": False}


def _format(recipe: Recipe) -> Body | None:
    if recipe.format is None:
        return None
    _, source = recipe.format
    schema = json.loads(source)
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _extras(recipe: Recipe) -> Body:
    """What differs from doing nothing."""
    asked: dict[str, tuple[object, object]] = {
        **{
            name: (getattr(recipe.sampling, name), setting.neutral)
            for name, setting in SAMPLING.items()
            if name not in ("temperature", "seed")  # which are always said
        },
        "stop": (list(recipe.stop), []),
        "ignore_eos": (recipe.ignore_eos, False),
        "response_format": (_format(recipe), None),
        **_logprobs(recipe),
    }
    return {name: value for name, (value, nothing) in asked.items() if value != nothing}


def _logprobs(recipe: Recipe) -> dict[str, tuple[object, object]]:
    """The two routes spell it differently."""
    if not recipe.messages:
        return {"logprobs": (recipe.logprobs, None)}
    return {
        "logprobs": (recipe.logprobs is not None, False),
        "top_logprobs": (recipe.logprobs or 0, 0),
    }
