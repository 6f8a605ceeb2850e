"""The models that an origin serves, loaded or not: what their workers have said of each.

An origin of one model may not know its name before a worker says it; one of several has the names
from its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tailrace.ledger.errors import NotFound, Unavailable
from tailrace.origin.workers.liveness import SILENT_S, Circuit
from tailrace.origin.workers.load_spans import COMPILE
from tailrace.origin.workers.worker_frame import LoadProgress, Ready
from tailrace.origin.workers.worker_process import WorkerSlot

if TYPE_CHECKING:  # it needs tokenizers, which only models of our own need
    from tailrace.origin.checkpoint.prompt import PromptReader

LOADING_RETRY_MS = 500
FAILED_STARTS = 4
"""Workers in a row that died, a served one among them perhaps, after which none is expected."""
CANNOT_START_RETRY_MS = 5_000


class ServedModel:
    """One of them. `name` is empty where only a worker knows it, and `reader` None where its
    workers answer in text.

    `ready` is what a worker said last, though none may be there now; `up` are the slots whose
    workers are. `deaths` counts workers since one became ready, `fate` is the last one's.
    """

    def __init__(self, name: str = "", reader: PromptReader | None = None) -> None:
        self.name = name
        self.reader = reader
        self.slots: Sequence[WorkerSlot] = ()
        self.ready: Ready | None = None
        self.up: list[WorkerSlot] = []
        self.loading: LoadProgress | None = None
        self.deaths = 0
        self.fate = ""
        self.circuit = Circuit()

    @property
    def is_resting(self) -> bool:
        """Whether it is to be loaded for the next request."""
        return bool(self.slots) and all(slot.is_resting for slot in self.slots)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it makes no token now; empty when it does, or could be loaded to."""
        if self.up:
            is_silent = all(slot.is_silent for slot in self.up)
            return (f"all workers are silent for over {SILENT_S:.0f} s",) if is_silent else ()
        again = f"; {self.deaths} died before, the last: {self.fate}" if self.deaths else ""
        if self.circuit.reason:
            return (f"{self.circuit.reason}{again}",)
        if self.is_resting and self.ready is not None:
            return ()
        if self.loading is None:
            return (f"starting a worker{again}",)
        stage, done, total = self.loading.stage, self.loading.done, self.loading.total
        if stage == COMPILE:
            return (f"compiling {done} of {total} kernels{again}",)
        how_far = f" {done}/{total}" if total else ""
        return (f"loading: {stage}{how_far}{again}",)

    def check_starts(self, now: float) -> None:
        """Raises `Unavailable` where it was never loaded, or its workers die before they are."""
        if not self.up and self.deaths >= (1 if self.ready is None else FAILED_STARTS):
            least_ms = max(CANNOT_START_RETRY_MS, round(self.circuit.retry_s(now) * 1000))
            raise Unavailable(f"the worker cannot start: {self.fate}", min_retry_ms=least_ms)
        if self.ready is None:
            raise Unavailable("the model is loading", code="loading", min_retry_ms=LOADING_RETRY_MS)


class ServedModels:
    """All of an origin; without any it is one that a worker will name."""

    def __init__(self, *models: ServedModel) -> None:
        self._all = models or (ServedModel(),)
        self._named = {model.name: model for model in self._all if model.name}
        self.leaving = False  # the origin goes away, when what is under way has ended

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._all)

    @property
    def are_named(self) -> bool:
        """By the settings, so that there may be several."""
        return bool(self._named)

    @property
    def names(self) -> tuple[str, ...]:
        """As requests call them, as far as that is known."""
        told = (model.name or (model.ready.model if model.ready else "") for model in self._all)
        return tuple(filter(None, told))

    def find(self, name: str) -> ServedModel:
        """The one that a request means; admission still compares an unnamed one's."""
        model = self._named.get(name) if self._named else self._all[0]
        if model is None:
            names = list(self._named)
            some = ", ".join(map(repr, names[:MOST_TOLD])) + (", …" if names[MOST_TOLD:] else "")
            raise NotFound(
                f"no model {name!r}",
                code="unknown_model",
                field="model",
                hint=f"this origin serves {some}",
            )
        return model

    def serves(self, name: str) -> bool:
        """Whether it is one of several that are named."""
        return name in self._named

    def is_up(self, name: str) -> bool:
        """Whether a worker of it is there; of one that nobody serves, any."""
        model = self._named.get(name)
        return bool(model.up if model is not None else any(each.up for each in self._all))

    def of(self, slot: WorkerSlot) -> ServedModel:
        return self._named[slot.model] if self._named else self._all[0]

    def may_take(self, slot: WorkerSlot, model: str) -> bool:
        """Whether streams of that model go to this slot; those that nobody serves go to any,
        which ends them."""
        return slot.model == model or model not in self._named

    def reader_of(self, name: str, only: PromptReader | None) -> PromptReader | None:
        """What a model's prompts are read by: of several models its own, or else the `only` one."""
        if not self._named:
            return only
        return self._named[name].reader if name in self._named else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no token is to be asked for now, of no model; empty when ready."""
        if self.leaving:
            return ("this origin is shutting down",)
        by_model = [(model, model.reasons) for model in self._all]
        if not all(reasons for _, reasons in by_model):
            return ()
        if not self._named:
            return by_model[0][1]
        return tuple(f"{model.name}: {reason}" for model, reasons in by_model for reason in reasons)


MOST_TOLD = 8
"""Names in an error."""
