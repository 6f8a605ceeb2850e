"""The process that renders a chat template: `python -m tailrace.origin.checkpoint.template_child`.

A template is code that came with the weights. Jinja's sandbox keeps it from reaching out, but not
from computing without end or taking all memory, some of it within a single call of the
interpreter, some of it while it is compiled. So the kernel ends this process at a bound of either.

Every line of its standard input is JSON, and answered by a line on its standard output. The first
holds a `template` and the `special` tokens that it may name, and is answered by {} or by a
`problem`, perhaps with its `line`. Each other one holds `messages`, `tools` (or null) and the time
that it is `now`, and is answered by a `text`, or by why it is `refused` by the template or
`failed`. The process ends when its input does: with its parent, however that ends.
`prompt` beside this is its other side.
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
"""Processor time of compiling a template, and of rendering it once. Real ones take tens of
milliseconds and less than one."""
MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process, which takes a tenth of it."""
MAX_ADDED_CHARS = 4 * 1024 * 1024
"""What a template may write beside the messages themselves; it ends one that never stops."""

Answer = dict[str, Any]
# What a template can do wrong by itself, beside what Jinja says of it. Of anything else this ends.
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)


class GenerationBlocks(Extension):
    """`{% generation %}` marks what a model is trained to say; here it is text as any other."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def serve(source: TextIO, sink: TextIO) -> None:
    """Answer until the source ends."""
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
    """SIGPROF ends the process where the body takes longer, whatever it is in the midst of."""
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
    except FAULTS as exc:  # constants are computed here, by whatever filters there are
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
    """Of all text in messages, or in tools."""
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
    """Jinja's own filter escapes what is special in HTML; prompts are no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def main() -> None:
    # Who ends the whole group with Ctrl-C ends the parent, and with it this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MAX_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with suppress(BrokenPipeError):
        serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
