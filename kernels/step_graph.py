"""A whole decode step in one CUDA graph: a launch for the step instead of five per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decoder import Decoder, Rows


class StepGraph:
    """The decode step of a fixed number of rows, none longer than `max_length`, and its logits.

    tables: int32 [sequences, max_pages], read anew by every step. The graph works in the
    decoder's buffers: steps of one decoder run one after another. Needs a CUDA device.
    """

    def __init__(self, decoder: Decoder, tables: Tensor, rows: int, max_length: int) -> None:
        # Rows of length 0 write nothing and read nothing: the rehearsal leaves no trace.
        self._rows = Rows(*torch.zeros(4, rows, dtype=torch.int32, device=decoder.device))
        self._graph = torch.cuda.CUDAGraph()
        rehearsal = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        rehearsal.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(rehearsal):  # compiles what is not yet compiled
            decoder.logits(decoder.decode(self._rows, tables, max_length))
        torch.cuda.current_stream().wait_stream(rehearsal)
        with torch.cuda.graph(self._graph):
            self.hidden = decoder.decode(self._rows, tables, max_length)
            """fp32 [rows, hidden] of the last step."""
            self.logits: Tensor = decoder.logits(self.hidden)
            """fp32 [rows, vocab] of the last step."""

    def __call__(self, rows: Rows) -> None:
        """Run a step; `hidden` and `logits` hold what comes of it once the device is through."""
        self._rows.copy_(rows)
        self._graph.replay()
