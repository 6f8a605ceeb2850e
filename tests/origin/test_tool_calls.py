"""Calls in the markup of real models' templates, cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.tool_calls import MARKUPS, CallPiece, CallReader, MarkupName, markup_of

HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}]"]}}\n</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "b": [2, "}]"]}}'
LISTED_CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}]"]}, "id": "a1b2c3d4e"}'
ADD = ("add", {"a": 1, "b": [2, "}]"]})

Call = tuple[str, object]


def read(markup: MarkupName, *pieces: str) -> tuple[str, list[Call]]:
    """Return the text and the calls of a whole output."""
    text, calls = _pieces(markup, *pieces)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def _pieces(markup: MarkupName, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(markup)
    out = [each for piece in pieces for each in reader.feed(piece)] + reader.feed("", last=True)
    text, calls = "", list[tuple[str, str]]()
    for each in out:
        if isinstance(each, str):
            assert each
            text += each
        else:
            assert each.size
            if each.name:
                assert each.call == len(calls)
                calls.append((each.name, ""))
            calls[each.call] = (calls[each.call][0], calls[each.call][1] + each.arguments)
    assert reader.calls == len(calls)
    return text, calls


@pytest.mark.parametrize(
    ("markup", "output", "text", "calls"),
    [
        ("hermes", "Hello <b>you</b>\n", "Hello <b>you</b>\n", []),
        ("hermes", HERMES_CALL, "", [ADD]),
        ("hermes", f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}\n", "Let me see.", [ADD, ADD]),
        ("hermes", f"{HERMES_CALL}\nDone.", "\nDone.", [ADD]),
        ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", {})]),
        # Another order of its parts, arguments as text, none at all.
        (
            "hermes",
            '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>',
            "",
            [("add", {"a": 1})],
        ),
        (
            "hermes",
            r'<tool_call>{"name": "add", "arguments": "{\"a\": \"x\\\\\"}"}</tool_call>',
            "",
            [("add", {"a": "x\\"})],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        # Text that only looks like a call stays text.
        ("hermes", "<tool_call>no JSON</tool_call>!", "<tool_call>no JSON</tool_call>!", []),
        ("hermes", '<tool_call>\n{"name": "a', '<tool_call>\n{"name": "a', []),
        ("hermes", "a <tool_cal", "a <tool_cal", []),
        ("hermes", "<tool_call>" + "x" * 2000, "<tool_call>" + "x" * 2000, []),
        ("llama", LLAMA_CALL, "", [ADD]),
        ("llama", f"\n{LLAMA_CALL}; {LLAMA_CALL}", "", [ADD, ADD]),
        (
            "llama",
            '{"type": "function", "name": "now", "parameters": {}}',
            "",
            [("now", {})],
        ),
        ("llama", f"I call {LLAMA_CALL}", f"I call {LLAMA_CALL}", []),
        ("llama", '{"city": "Ulm"}', '{"city": "Ulm"}', []),
        ("llama", "  ", "  ", []),
        ("llama", ' {"city": "Ulm"}', ' {"city": "Ulm"}', []),
        ("llama", "\n{", "\n{", []),
        ("llama", f'{LLAMA_CALL}; {{"city": "Ulm"}}', '; {"city": "Ulm"}', [ADD]),
        ("hermes", "a \n<tool_call>{}</tool_call>", "a \n<tool_call>{}</tool_call>", []),
        ("mistral", f"I see. [TOOL_CALLS] [{LISTED_CALL}]", "I see.", [ADD]),
        ("mistral", f"[TOOL_CALLS][{LISTED_CALL}, {LISTED_CALL}]\n", "", [ADD, ADD]),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "now"}]', "", [("now", {})]),
        ("mistral", "a [TOOL_CALLS]add[ARGS]{}", "a [TOOL_CALLS]add[ARGS]{}", []),
        ("mistral", "a [TOOL_CALLS] [{}] b", "a [TOOL_CALLS] [{}] b", []),
        ("mistral", "a [TOOL_CALLS] [", "a [TOOL_CALLS] [", []),
    ],
)
def test_calls_are_taken_out_of_the_text_however_it_is_cut(
    markup: MarkupName, output: str, text: str, calls: list[Call]
) -> None:
    assert read(markup, output) == (text, calls)
    assert read(markup, *output) == (text, calls)
    for at in range(len(output)):
        assert read(markup, output[:at], output[at:]) == (text, calls)


def test_arguments_come_as_they_are_made() -> None:
    reader = CallReader("hermes")
    head = reader.feed('<tool_call>\n{"name": "say", "arguments": {"te')
    assert head == [CallPiece(0, "say"), CallPiece(0, arguments='{"te')]
    assert reader.feed('xt": "a') == [CallPiece(0, arguments='xt": "a')]


def test_a_call_that_is_cut_off_keeps_what_came_of_it() -> None:
    assert _pieces("hermes", HERMES_CALL[:50]) == ("", [("add", HERMES_CALL[41:50])])


LIKE_CALLS = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<tool", *'{}[],:;" \\n\n', '"name"', '"x"'])
    | st.sampled_from(['"arguments"', '"parameters"', HERMES_CALL, LLAMA_CALL, "[TOOL_CALLS]"]),
    max_size=12,
).map("".join)


@given(LIKE_CALLS | st.text(max_size=60), st.integers(0, 60))
def test_no_text_is_lost_or_depends_on_cuts(output: str, at: int) -> None:
    for markup in MARKUPS:
        whole = _pieces(markup, output)
        assert whole == _pieces(markup, output[:at], output[at:])
        assert whole == _pieces(markup, *output)
        if not whole[1]:
            assert whole[0] == output


@pytest.mark.parametrize(
    ("template", "markup"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{% endif %}", "hermes"),
        (
            "{% if tools %}{% endif %}<|python_tag|>"
            """{{- '"parameters": ' }}{{ tool_call.arguments | tojson }}""",
            "llama",
        ),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", "mistral"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]add[ARGS]", None),
    ],
)
def test_a_template_tells_how_its_model_calls(template: str, markup: str | None) -> None:
    assert markup_of(template) == markup
