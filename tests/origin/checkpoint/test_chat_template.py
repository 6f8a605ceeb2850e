"""Chat templates: rendering, limits, and the process in which they run."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.prompt import MAX_TEMPLATE_BYTES, ChatTemplate, load_template
from tailrace.origin.checkpoint.template_child import MAX_MEMORY_BYTES

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TURNS = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Hello\nthere "},
    {"role": "assistant", "content": "<think>hm</think>\n\nHi."},
    {"role": "user", "content": 'What is "1 + 1"? ü'},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    # Blocks on lines of their own leave no lines behind.
    "{% for m in messages %}\n    {% if loop.first %}\n[first]\n    {% endif %}\n"
    "{{ m['content'] }}\n{% endfor %}\n",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{% endfor %}{{ dict(a=1).a }}",
    "{% for m in messages %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}",
    "{% macro turn(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if not tools is defined %}no{% endif %}{% if tools is none %}none{% endif %}"
    "{% if enable_thinking is defined %}think{% endif %}{{ missing }}",
    "{{ additional_special_tokens | join(',') }} {{ pad_token }}",
]
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "additional_special_tokens": ["<a>", {"content": "<b>"}],
}
KNOWN = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<a>", "<b>"]}


def write_config(directory: Path, **keys: object) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | keys))
    return directory


def loaded(directory: Path) -> ChatTemplate:
    template = load_template(directory, lambda: NOON)
    assert template is not None
    return template


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_writes_what_it_writes_in_transformers(tmp_path: Path, source: str) -> None:
    write_config(tmp_path, chat_template=source)
    known: dict[str, Any] = {"add_generation_prompt": True, **KNOWN}
    expected: Any = render_jinja_template([TURNS], chat_template=source, **known)
    assert [loaded(tmp_path).render(TURNS)] == expected[0]


def test_a_checkpoint_may_have_no_template(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    assert load_template(write_config(tmp_path)) is None


def test_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert loaded(tmp_path).render(TURNS) == "file </s>"


@pytest.mark.parametrize(
    "named",
    [
        [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}],
        [{"name": "only", "template": "a"}],
    ],
)
def test_of_named_templates_the_default_counts(tmp_path: Path, named: object) -> None:
    assert loaded(write_config(tmp_path, chat_template=named)).render(TURNS) == "a"


def test_special_tokens_are_found_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<u>", "bos_token": "<x>"}')
    write_config(tmp_path, chat_template="{{ unk_token }}{{ bos_token }}")
    assert loaded(tmp_path).render(TURNS) == "<u><s>"


def test_the_date_is_that_of_the_clock_it_was_given(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    assert loaded(tmp_path).render(TURNS) == "01 Mar 2026"


def test_what_a_template_raises_is_the_conversations_fault(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="{{ raise_exception('no system here') }}")
    with pytest.raises(TemplateError, match="no system here"):
        loaded(tmp_path).render(TURNS)


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ 'x' | int + [] }}"])
def test_what_a_template_does_wrong_is_its_own_fault(tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelError, match="the chat template fails"):
        loaded(write_config(tmp_path, chat_template=source)).render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_a_template_does_not_reach_out_of_its_sandbox(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateError):
        loaded(write_config(tmp_path, chat_template=source)).render(TURNS)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"]
)
def test_what_lies_outside_the_sandbox_is_not_there(tmp_path: Path, source: str) -> None:
    assert loaded(write_config(tmp_path, chat_template=source)).render(TURNS) == ""


def test_a_template_that_writes_without_end_is_ended(tmp_path: Path) -> None:
    endless = (
        "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(ModelError, match="adds more than") as caught:
        loaded(write_config(tmp_path, chat_template=endless)).render(TURNS)
    assert caught.value.field == str(tmp_path / "tokenizer_config.json")


def test_a_template_that_does_not_parse_is_refused_with_its_line(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="{% if a %}\n{{ a }\n{% endif %}")
    with pytest.raises(ModelError, match="chat_template:2: does not parse") as caught:
        load_template(tmp_path)
    assert caught.value.field == str(tmp_path / "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("a\nb\n{% endif %}")
    with pytest.raises(ModelError, match="line 3: does not parse") as caught:
        load_template(tmp_path)
    assert caught.value.field == str(tmp_path / "chat_template.jinja")


@pytest.mark.parametrize(
    "value", [7, {"a": "b"}, [], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]]
)
def test_a_template_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match="chat_template: "):
        load_template(write_config(tmp_path, chat_template=value))


def test_a_template_that_is_no_text_or_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        load_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ModelError, match="is longer than"):
        load_template(tmp_path)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TIME = "more than 0.5 s of processor time"
# Where taking memory is slow, the time is over first.
MEMORY = "more than (512 MiB of memory|0.5 s of processor time)"
DOUBLED = "{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (LOOPS, TIME),
        ("{% for i in range(99999) if range(99999) | sum < 0 %}{% endfor %}", TIME),
        ("{% for i in [0] recursive %}{{ loop([0]) }}{% endfor %}", "recursion depth"),
        ("{{ 9 ** 99999999 }}", TIME),
        ("{% set n = messages | length %}{{ n ** 99999999 }}", TIME),
        ("{% set x = messages[0].content %}{{ (x * 999999) | wordwrap(1) }}", TIME),
        ("{{ lipsum(n=100000) }}", TIME),
        ("{{ 'x' * 4000000000 }}", MEMORY),
        ("{% set n = messages | length %}{{ ('x' * 1000000000 * n) | length }}", MEMORY),
        ("{{ '%2000000000d' % 1 }}", MEMORY),
        ("{{ 'x'.center(3000000000) }}", MEMORY),
        ("{% set ns = namespace(a='x') %}" + DOUBLED, MEMORY),
        ("{% set ns = namespace(a=[1]) %}" + DOUBLED, MEMORY),
        # A list of lists of the same list: small until it is written or compared.
        ("{% set ns = namespace(a=[], b=[]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}"
         "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}", TIME),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion depth"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
    ],
)  # fmt: skip
def test_a_template_that_computes_without_end_is_ended(
    tmp_path: Path, source: str, why: str
) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        loaded(write_config(tmp_path, chat_template=source)).render(TURNS)
    assert caught.value.field == str(tmp_path / "tokenizer_config.json")


def test_one_message_that_a_template_loops_over_does_not_end_the_others(tmp_path: Path) -> None:
    source = "{% if messages[0].content == 'boom' %}" + LOOPS + "{% endif %}{{ messages | length }}"
    template = loaded(write_config(tmp_path, chat_template=source))
    assert template.render(TURNS) == "4"
    with pytest.raises(ModelError, match=TIME):
        template.render([{"role": "user", "content": "boom"}])
    assert template.render(TURNS) == "4"


def child_of(template: ChatTemplate) -> int:
    child = template._process._child
    assert child is not None
    return child.pid


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the limits of another process")
def test_the_kernel_bounds_the_memory_of_a_template(tmp_path: Path) -> None:
    template = loaded(write_config(tmp_path, chat_template="{{ messages | length }}"))
    limits = resource.prlimit(child_of(template), resource.RLIMIT_AS)
    assert limits == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)


def test_a_child_that_gives_no_answer_is_ended_and_the_next_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = loaded(write_config(tmp_path, chat_template="{{ messages | length }}"))
    stopped = child_of(template)
    os.kill(stopped, signal.SIGSTOP)
    mercy = Timer(60, os.kill, (stopped, signal.SIGKILL))  # or this would never fail
    mercy.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr("tailrace.origin.checkpoint.prompt.ANSWER_TIMEOUT_S", 0.1)
            with pytest.raises(ModelError, match=r"it gave no answer for 0\.1 s"):
                template.render(TURNS)
    finally:
        mercy.cancel()
    assert template.render(TURNS) == "4"
    assert child_of(template) != stopped


PARENT = """
import signal, sys
from pathlib import Path
from tailrace.origin.checkpoint.prompt import load_template

template = load_template(Path(sys.argv[1]))
print(template._process._child.pid, flush=True)
signal.pause()
"""
ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is not its own")
def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="x")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        end = os.pidfd_open(child)
        parent.kill()
        try:
            assert select.select([end], [], [], TIMEOUT_S)[0], "it lives on"
        finally:
            if not select.select([end], [], [], 0)[0]:
                os.kill(child, signal.SIGKILL)
            os.close(end)
