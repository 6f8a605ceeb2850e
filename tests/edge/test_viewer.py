from __future__ import annotations

from edge.viewer import Summary, printable


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9bc\x7f\r") == "a\ufffd[2Jb\ufffdc\ufffd\ufffd"
    assert printable("two\nlines\tZoé 🦊") == "two\nlines\tZoé 🦊"


def test_a_summary_is_one_line() -> None:
    summary = Summary(60, "length", ttft_s=0.0123, tokens_per_s=310.4, resumes=1)
    assert str(summary) == "60 tokens · TTFT 12 ms · 310 tok/s · 1 resume · length"


def test_a_single_token_has_no_rate() -> None:
    summary = Summary(1, "stop", ttft_s=0.5, tokens_per_s=None, resumes=0)
    assert str(summary) == "1 token · TTFT 500 ms · 0 resumes · stop"
