"""The parts of the benchmark that could lie: the frames, the figures, the parsers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.bench_ledger import Bench
from tests.bench.bench_ledger_report import ALWAYS, EVERYSEC, FLOOR, LEDGER, STORAGE, Report
from tests.bench.bench_ledger_work import (
    FRAME_BYTES,
    LONG_FRAMES,
    Batch,
    Contender,
    Mode,
    Sample,
    check_replay,
    frame,
    percentile,
)
from tests.bench.measured import median_interval
from tests.bench.peers.durable_streams import content_length, read_answer


def test_every_frame_of_the_work_has_the_same_size_and_no_line_break() -> None:
    frames = [frame(index) for index in range(LONG_FRAMES)]
    assert {len(raw) for raw in frames} == {FRAME_BYTES}
    assert not any(b"\r\n" in raw for raw in frames)
    assert len(set(frames)) == LONG_FRAMES


def test_a_replay_of_other_frames_is_not_taken_for_one() -> None:
    frames = [frame(index) for index in range(3)]
    check_replay(frames, 3)
    for wrong in (frames[:2], [*frames, frame(3)], frames[::-1]):
        with pytest.raises(ValueError):
            check_replay(wrong, 3)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.99) == 100
    assert percentile([7.0], 0.99) == 7


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (b"HTTP/1.1 204 No Content\r\nx: y", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\nx: y", 18),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", None),
    ],
)
def test_the_length_of_a_body_is_read_from_its_head(head: bytes, length: int | None) -> None:
    assert content_length(head) == length


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_chunked_body_is_joined_however_it_is_cut(piece: int) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\n10\r\n"
    raw += b"0123456789abcdef\r\n0\r\n\r\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for at in range(0, len(raw), piece):
            theirs.sendall(raw[at : at + piece])
        assert read_answer(ours) == b"ab\n0123456789abcdef"


def test_a_ratio_is_made_within_a_round_and_of_the_quickest_peer(tmp_path: Path) -> None:
    ours, slow, quick = (STORAGE, Mode.PROCESS), ("NATS a", Mode.PROCESS), ("NATS b", Mode.PROCESS)
    report = Report(tmp_path, [ours, slow, quick])
    report.results[ours].wide = [Sample(100, seconds, [seconds]) for seconds in (1.0, 2.0, 4.0)]
    report.results[quick].wide = [Sample(100, seconds, [seconds]) for seconds in (2.0, 2.0, 2.0)]
    report.results[slow].wide = [Sample(100, 10.0, [10.0])] * 3
    assert report.ratio(ours, [slow, quick]) == 1.0
    assert report.ratio(ours, [slow]) == 5.0


def test_what_was_not_measured_is_neither_met_nor_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path, [(LEDGER, Mode.PROCESS), EVERYSEC, ALWAYS])
    report.results[EVERYSEC].failure = "missing: apt-get install redis-server"
    assert {target.met for target in report.targets()} == {None}
    report.print(quiet=False)
    out = capsys.readouterr().out
    assert "apt-get install redis-server" in out
    assert "MISSED" not in out


def test_the_bounds_of_a_median_are_those_that_so_few_values_allow() -> None:
    assert median_interval([3, 1, 2]) == (1, 2, 3)
    twelve = [float(n) for n in range(12, 0, -1)]
    # Twelve values lie above or below the median in 4,096 ways. In 158 of them, 3.9 %, ten or
    # more lie on one side.
    assert median_interval(twelve) == (3, 6.5, 10)


def test_the_ledger_redis_and_the_raw_file_take_turns(tmp_path: Path) -> None:
    turns: list[str] = []

    class Named(Contender):
        def __init__(self, key: tuple[str, Mode]) -> None:
            self.name, self.mode = key

        def start(self, folder: Path) -> None: ...

        def append(self, batch: Batch) -> Sample:
            turns.append(self.name)
            return Sample(1, 1.0, [1.0])

        def stop(self) -> None: ...

    keys = [FLOOR, (LEDGER, Mode.POWER), ALWAYS, EVERYSEC]
    Bench([Named(key) for key in keys], Report(tmp_path, keys), Console(quiet=True)).take_turns(2)
    power = [LEDGER, ALWAYS[0], FLOOR[0]]
    assert turns == [*power, *reversed(power)], "those whose neighbours are missing take none"
