"""The messages between a pipeline's worker and a process that runs stages: orders and replies.

A message is the size of its body (a u32 in little-endian order), followed by the body, a pickled
object. The worker sends an `Order`, and the process answers with a `Reply`. Both are processes of
the same origin, so pickle is safe here.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from tailrace.ledger.errors import TailraceError
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.gpu.listing import visible_gpus
from tailrace.origin.pipelines.stage import AnyStage, Item, StageContext, StageOptions
from tailrace.origin.producer import End

LENGTH_BYTES = 4
"""Number of bytes of the u32 in front of a message."""


@dataclass(frozen=True, slots=True)
class Load:
    """The first order to a process of kind `gpu`: to load what the stage objects share.

    `device` is that of the settings: `auto`, `cuda` or `cpu`.
    """

    stage: type[AnyStage]
    options: StageOptions
    device: str


@dataclass(frozen=True, slots=True)
class Begin:
    """An order to make the stage object `key` for a stream."""

    key: int
    stage: type[AnyStage]
    options: StageOptions
    name: str
    stream: bytes
    recipe: str
    """The JSON of the stream's recipe."""
    begin: int
    """Number of the stage's items before the first one of the object."""


@dataclass(frozen=True, slots=True)
class Process:
    """An order to give an item, or the End of its input, to the stage object `key`."""

    key: int
    item: Item


@dataclass(frozen=True, slots=True)
class Forget:
    """An order to close and drop the stage object `key`; `has_ended` as for `Stage.close`."""

    key: int
    has_ended: bool


Order = Load | Begin | Process | Forget


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to an order: the items that a stage gave, and those that it holds back.

    If the stage has failed, `failure` says why. The reply to a `Load` has the `device` that the
    process uses.
    """

    items: tuple[Item, ...] = ()
    held: tuple[Item, ...] = ()
    failure: str | None = None
    device: str = ""


class StageObjects:
    """The stage objects of this process, by key."""

    def __init__(self) -> None:
        """Begin without any."""
        self._stages: dict[int, AnyStage] = {}
        self._device = ""
        self._loaded: Any = None

    def carry_out(self, order: Order) -> Reply:
        """Carry out an order; whatever a stage raises becomes the failure of the reply."""
        try:
            return self._carry_out(order)
        except Exception as error:  # noqa: BLE001  (a stage may raise anything)
            is_ours = isinstance(error, TailraceError)
            return Reply(failure=str(error) if is_ours else f"{type(error).__name__}: {error}")

    def _carry_out(self, order: Order) -> Reply:
        match order:
            case Load():
                self._device = _device(order.device)
                self._loaded = order.stage.load(order.options, self._device)
                return Reply(device=self._device)
            case Begin():
                recipe = Recipe.model_validate_json(order.recipe)
                context = StageContext(
                    order.name,
                    order.stream,
                    recipe,
                    None,
                    order.begin,
                    self._device,
                    self._loaded,
                )
                self._stages[order.key] = order.stage(order.options, context)
            case Forget(key=key, has_ended=has_ended):
                if (dropped := self._stages.pop(key, None)) is not None:
                    dropped.close(has_ended)
            case Process(key=key, item=item):
                stage = self._stages[key]
                made = stage.finish(item) if isinstance(item, End) else stage.process(item)
                return Reply(tuple(made), tuple(stage.held()))  # type: ignore[arg-type]
        return Reply()


def _device(said: str) -> str:
    """Return the device for the setting `device`: with `auto` a GPU if this machine has one."""
    if said != "auto":
        return said
    return "cuda" if visible_gpus() else "cpu"


def packed(message: Order | Reply) -> bytes:
    """Return a message as bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
