"""A step that a device has been asked for, until its results are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from origin.engine.generation import Generation
from origin.models.device import Launched
from origin.scheduler.plan import Plan, Work


@dataclass(slots=True)
class Flight:
    """A plan that is being done; of its work the run's generation and its number of draws."""

    plan: Plan
    began_s: float
    works: list[tuple[Work, Generation, int]] = field(default_factory=list)
    launched: Launched | None = None

    @property
    def is_late(self) -> bool:
        """Whether the next plan may be made before its results are known."""
        return all(
            work.draws and len(work.ids) == 1 and not work.prefill and generation.draws_alone
            for work, generation, _ in self.works
        )

    @property
    def awaited(self) -> dict[Generation, int]:
        """Of each generation the place of its draw."""
        return {generation: place for place, (_, generation, _) in enumerate(self.works)}
