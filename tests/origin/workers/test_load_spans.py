"""Where the time of a start goes."""

from __future__ import annotations

from tailrace.origin.workers.load_spans import LoadSpans, LoadStage, WorkerStart


def test_stages_follow_one_another_without_gaps_and_one_that_is_named_again_goes_on() -> None:
    now = iter((1.0, 2.0, 2.0, 4.0, 4.0, 7.0))
    spans = LoadSpans(lambda: next(now))
    spans.begin("imports")
    spans.enter("read", 100)
    spans.enter("read", 100)
    spans.enter("unpack")
    assert spans.close() == (
        LoadStage("imports", 1.0, 2.0),
        LoadStage("read", 2.0, 4.0, 100),
        LoadStage("unpack", 4.0, 7.0),
    )


def test_a_process_that_was_forked_does_not_count_what_its_parent_did() -> None:
    now = iter((1.0, 5.0, 6.0))
    spans = LoadSpans(lambda: next(now))
    spans.begin("imports")
    spans.begin("connect")
    assert spans.close() == (LoadStage("connect", 5.0, 6.0),)


def test_what_no_stage_covers_is_not_attributed() -> None:
    stages = (LoadStage("fork", 1.0, 2.0), LoadStage("read", 2.0, 4.0))
    assert WorkerStart("fork", 1.0, 5.0, stages).attributed == 0.75
