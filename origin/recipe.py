"""What continuing a generation needs, besides the token ids that the ledger holds."""

from __future__ import annotations

import hashlib
import struct

from pydantic import BaseModel, ConfigDict

from ledger.frame import Token, decode
from ledger.interface import Record
from origin.worker_frame import Run


class Recipe(BaseModel):
    """Stored as JSON with the stream, never sent to clients.

    `fingerprint` names the weights, kernels and versions that make the tokens: another
    engine would continue with other tokens than the uninterrupted run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    fingerprint: str
    prompt_ids: tuple[int, ...]
    prompt_sha256: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: str

    def run(self, records: list[Record]) -> Run:
        """The worker's order to start, or to go on after `records`."""
        sent_bytes = 0
        for record in records:
            _, frame = decode(record.frame)
            sent_bytes += len(frame.text.encode()) if isinstance(frame, Token) else 0
        return Run(
            prompt_ids=self.prompt_ids,
            generated_ids=tuple(i for record in records for i in record.ids),
            sent_bytes=sent_bytes,
            next_index=len(records),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


def prompt_hash(prompt_ids: tuple[int, ...]) -> str:
    """SHA-256 over the ids as little-endian u32, hex."""
    return hashlib.sha256(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids)).hexdigest()
