"""The emissions of a step one by one, as its worker made them."""

from __future__ import annotations

from tailrace.origin.workers.worker_frame import NOT_COUNTED, Emission, Emissions, Step


def rows(made: Step | Emissions) -> list[Emission]:
    if isinstance(made, Step):
        made = made.cut()
    columns = made.runs, made.indexes, made.ids, made.frames
    return [
        Emission(
            run,
            index,
            ids,
            made.steered.get(at, ()),
            frame,
            counted=made.counted.get(at, NOT_COUNTED),
        )
        for at, (run, index, ids, frame) in enumerate(zip(*columns, strict=True))
    ]
