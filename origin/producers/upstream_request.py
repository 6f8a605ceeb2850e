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

from typing import Any

from ledger.frame import SAMPLING
from origin.generations.recipe import Recipe

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
        "max_tokens": recipe.max_tokens - made,
        "temperature": recipe.sampling.temperature,
        "seed": (recipe.sampling.seed or 0) & MAX_SEED,
        **_source(recipe, delivered),
        **_extras(recipe),
    }
    return body


def _source(recipe: Recipe, delivered: str) -> Body:
    if not recipe.messages:
        return {"prompt": (recipe.prompt or "") + delivered}
    messages = [{"role": role, "content": content} for role, content in recipe.messages]
    if not delivered:
        return {"messages": messages}
    return {
        "messages": [*messages, {"role": "assistant", "content": delivered}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


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
    }
    return {name: value for name, (value, nothing) in asked.items() if value != nothing}
