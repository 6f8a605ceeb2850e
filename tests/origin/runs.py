"""Runs and emissions as a supervisor would see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ledger.frame import StreamEnd, Token, decode
from origin.engine import Engine
from origin.worker_frame import Emission, Run

PLAIN: dict[str, Any] = {
    "prompt_ids": (1, 2, 3),
    "generated_ids": (),
    "sent_bytes": 0,
    "next_index": 0,
    "max_tokens": 60,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "stop": (),
    "ignore_eos": False,
}


def make_run(**fields: Any) -> Run:
    return Run(**(PLAIN | fields))


def frame_of(emission: Emission) -> Token | StreamEnd:
    corr, frame = decode(emission.frame)
    assert corr == 0
    assert isinstance(frame, Token | StreamEnd)
    assert frame.index == emission.index
    return frame


def frames_of(emissions: Sequence[Emission]) -> list[Token | StreamEnd]:
    return [frame_of(emission) for emission in emissions]


def text_of(emissions: Sequence[Emission]) -> str:
    return "".join(f.text for f in frames_of(emissions) if isinstance(f, Token))


def end_of(emissions: Sequence[Emission]) -> StreamEnd:
    """The StreamEnd of a run, which is its last emission and the only one."""
    frames = frames_of(emissions)
    ends = [frame for frame in frames if isinstance(frame, StreamEnd)]
    assert ends == frames[-1:]
    return ends[0]


def continuation(fields: dict[str, Any], logged: Sequence[Emission]) -> Run:
    """The run that goes on from what a ledger holds, as the supervisor asks for it."""
    return make_run(
        **fields,
        generated_ids=tuple(token for emission in logged for token in emission.ids),
        sent_bytes=len(text_of(logged).encode()),
        next_index=len(logged),
    )


def run_all(engine: Engine, runs: dict[int, Run]) -> dict[int, list[Emission]]:
    """Add runs, then step until the engine is idle; the emissions of each run."""
    for run_id, run in runs.items():
        engine.add(run_id, run)
    emitted: dict[int, list[Emission]] = defaultdict(list)
    while not engine.idle:
        for emission in engine.step():
            emitted[emission.run].append(emission)
    return emitted
