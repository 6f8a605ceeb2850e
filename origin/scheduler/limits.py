"""What bounds the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kernels.shapes import PAGE_TOKENS
from ledger.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Raises ConfigError for what cannot work."""

    running: int = 64
    """Runs that hold pages."""
    waiting: int = 1024
    """Runs of one class that wait; preempted ones come on top."""
    step_tokens_least: int = 2 * PAGE_TOKENS
    """The step's limit of tokens adapts, but not below this: a chunk and some rows."""
    step_tokens_most: int = 64 * PAGE_TOKENS
    step_rows_least: int = 8
    """The step's limit of rows adapts, but not below this."""
    step_seconds: float = 0.05
    """How long a step should take: what a decoding run waits for its next token."""
    replay_rows: int = PAGE_TOKENS
    """Known tokens of one continued run in one step."""
    draft_rows: int = 8
    """Guesses for one run in one step."""

    def __post_init__(self) -> None:
        least = {
            "running": 1,
            "waiting": 1,
            "step_tokens_least": PAGE_TOKENS + 1,
            "step_tokens_most": self.step_tokens_least,
            "step_rows_least": 1,
            "replay_rows": 1,
            "draft_rows": 0,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{getattr(self, name)}", field=name, hint=f"at least {value}")
        if not 0 < self.step_seconds < inf:
            raise ConfigError(f"{self.step_seconds}", field="step_seconds", hint="above 0 s")
