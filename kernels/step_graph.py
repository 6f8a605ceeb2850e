"""Captured forward passes: one CUDA graph on a GPU in place of five launches per layer.

`PrefillGraph` and `ReplayGraph` end with hidden rows. `DrawnStep` also contains the LM head and the
sampler, and ends with tokens. All three use the decoder's buffers, so graphs of one decoder must
run one after another. Without a CUDA device the kernels are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.decoder import Decoder
from tailrace.kernels.sampler.sampler_rows import SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import sample_rows
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.kernels.step_inputs import PrefillInputs, StepInputs, aligned

Launch = Callable[[], Tensor]
Capture = Callable[[Launch], Launch]
"""Function that captures a function's launches and returns a function that replays them. The
launches read and write the same addresses each time."""


class PrefillGraph:
    """A prefill of up to `count` rows in up to `chunks` chunks of at most PAGE_TOKENS tokens."""

    def __init__(
        self, decoder: Decoder, tables: BlockTables, count: int, chunks: int, capture: Capture
    ) -> None:
        self.inputs = PrefillInputs(count, chunks, tables)
        self._decoder = decoder
        self._run = capture(self._launch)

    def __call__(self) -> Tensor:
        """Run the prefill whose values are in `inputs`; return the result of `Decoder.prefill`."""
        return self._run()

    def _launch(self) -> Tensor:
        inputs = self.inputs
        inputs.update()
        return self._decoder.prefill(inputs.rows, inputs.chunks, inputs.tables, PAGE_TOKENS)


class ReplayGraph:
    """A step of up to `count` rows of any sequences, of at most `max_length` positions.

    Each row gets the same bits as in a decode step (`Decoder.replay`). before: int32 [draws], the
    tokens that ids below 0 stand for (see `Rows`).
    """

    def __init__(
        self,
        decoder: Decoder,
        tables: BlockTables,
        before: Tensor,
        count: int,
        max_length: int,
        capture: Capture,
    ) -> None:
        self.inputs = StepInputs(count, tables, before)
        self._decoder = decoder
        self._max_length = max_length
        self._run = capture(self._launch)

    def __call__(self) -> Tensor:
        """Run the step whose values are in `inputs` and return hidden rows, fp32 [count, hidden].

        They are a view of a buffer that the decoder's next call overwrites.
        """
        return self._run()

    def _launch(self) -> Tensor:
        self.inputs.update()
        return self._decoder.replay(self.inputs.rows, self.inputs.tables, self._max_length)


class DrawnStep:
    """A step of up to `count` rows of distinct sequences, from token ids to drawn token ids.

    before: int32 [draws], the tokens that ids below 0 stand for (see `Rows`). workspace: working
    memory of the sampler. max_length: maximum length of the rows in tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        workspace: SamplerWorkspace,
        tables: BlockTables,
        before: Tensor,
        count: int,
        max_length: int,
        capture: Capture,
    ) -> None:
        self.inputs = StepInputs(count, tables, before)
        self._decoder = decoder
        self._workspace = workspace
        self._max_length = max_length
        self._drawn = torch.zeros(2, aligned(count), dtype=torch.int32, device=decoder.device)
        self.logits = decoder.logits_buffer(count)
        """Logits of the last run, fp32 [count, vocab], valid until the decoder's next call."""
        self._run = capture(self._launch)

    def __call__(self) -> Tensor:
        """Run the step and return the drawn ids and the faults of its rows: int32 [2, n].

        n is the number of rows of the step, or more. The next run overwrites the result. The faults
        are the FAULT_* bits of the decoder and the sampler. The id of a row with a fault is
        meaningless.
        """
        return self._run()

    def _launch(self) -> Tensor:
        decoder, inputs = self._decoder, self.inputs
        ids, faults = self._drawn[:, : len(inputs.rows)]
        inputs.update()
        hidden = decoder.decode(inputs.rows, inputs.tables, self._max_length)
        decoder.logits(hidden)
        sample_rows(
            self.logits, inputs.settings, ids, faults, self._workspace,
            dependent=decoder.dependent,
        )  # fmt: skip
        faults |= decoder.faults[: len(faults)]
        return self._drawn


def capture_for(device: torch.device) -> Capture:
    """Return the capture for this device: a CUDA graph, or plain launches on a CPU."""
    return cuda_graph if device.type == "cuda" else launched


def launched(launch: Launch) -> Launch:
    """Return `launch` itself, so that each run launches the kernels one by one."""
    return launch


def cuda_graph(launch: Launch) -> Launch:
    """Capture the launches in a CUDA graph, after one ordinary run that loads their kernels.

    The inputs of that run are padding rows only, which touch neither the cache nor the tables.
    `torch.cuda.graph` is not used, because it collects garbage and empties the allocator's caches,
    and there are some eighty graphs.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()
        # Finish earlier work, because any query about it would end the capture.
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            result = launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def run() -> Tensor:
        graph.replay()
        return result

    return run
