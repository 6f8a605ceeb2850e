"""The process that renders a chat template: `python -m tailrace.origin.checkpoint.template_child`.

A template is code that comes with the weights. Jinja's sandbox denies it access to the system, but
does not keep it from computing for ever or using all memory, even during compilation or within a
single call into the interpreter. So the operating system limits the CPU time and the memory of this
process.

Each line of standard input is a JSON object, and is answered by a JSON object on standard output.
The first line has the `template` and the `special` tokens that it may name; the answer is {} or has
a `problem`, perhaps with its `line`. Each further line has `messages`, `tools` (or null) and the
time `now`; the answer has the `text`, or the reason under `refused` or `failed`. The process ends
when its standard input is closed, and thus with its parent. The parent's side is in `prompt`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NoReturn, TextIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 0.5
"""Maximum CPU seconds for compiling a template, and for each rendering.

Real templates compile in tens of milliseconds and render in less than one."""
MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Maximum address space of the process in bytes. Without a template the process uses a tenth of
this."""
MAX_ADDED_CHARS = 4 * 1024 * 1024
"""Maximum number of characters that a template may add to those of messages and tools."""

Answer = dict[str, Any]
# Errors that a template may raise besides those of Jinja. Any other error ends the process.
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)


class GenerationBlocks(Extension):
    """Supports the tag `{% generation %}`, which marks text for training: renders the text only."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def serve(source: TextIO, sink: TextIO) -> None:
    """Answer each line of `source` until its end."""
    template: Template | None = None
    for line in source:
        asked = json.loads(line)
        with _limited_cpu():
            if template is None:
                template, answer = _compiled(asked["template"], asked["special"])
            else:
                answer = _rendered(template, asked)
        print(json.dumps(answer), file=sink, flush=True)


@contextmanager
def _limited_cpu() -> Iterator[None]:
    """Let SIGPROF end the process if the `with` block takes more than MAX_CPU_S of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _compiled(source: str, special: Mapping[str, Any]) -> tuple[Template | None, Answer]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    names = {"raise_exception": _raise}
    try:
        return environment.from_string(source, globals={**special, **names}), {}
    except TemplateSyntaxError as exc:
        return None, {"problem": f"does not parse: {exc.message}", "line": exc.lineno}
    except FAULTS as exc:  # while compiling, Jinja evaluates constant expressions and their filters
        return None, {"problem": f"cannot be compiled: {_said(exc)}"}


def _rendered(template: Template, asked: Mapping[str, Any]) -> Answer:
    time = datetime.fromisoformat(asked["now"])
    given = {"messages": asked["messages"], "tools": asked["tools"], "documents": None}
    left = MAX_ADDED_CHARS + _chars(asked["messages"]) + _chars(asked["tools"])
    pieces: list[str] = []
    try:
        for piece in template.generate(
            **given, strftime_now=time.strftime, add_generation_prompt=True
        ):
            left -= len(piece)
            if left < 0:
                return {"failed": f"it adds more than {MAX_ADDED_CHARS} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except TemplateError as exc:
        return {"refused": str(exc)}
    except FAULTS as exc:
        return {"failed": _said(exc)}


def _chars(value: object) -> int:
    """Return the number of characters of all text in messages, or in tools."""
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_chars, value))
    return len(value) if isinstance(value, str) else 0


def _said(exc: Exception) -> str:
    if isinstance(exc, MemoryError):
        return f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    return str(exc) or type(exc).__name__


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def main() -> None:
    # Ctrl-C reaches the whole process group; this process ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MAX_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with suppress(BrokenPipeError):
        serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
