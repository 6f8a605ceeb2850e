"""Stages: Python classes, each of which transforms the items of one stream.

    class Shout(Stage):
        class Options(StageOptions):
            mark: str = "!"

        def process(self, item: Item) -> Iterable[Item]:
            if isinstance(item, Text):
                item = Text(item.text.upper() + self.options.mark)
            yield item

A pipeline gives its first stage the `Prompt` of the request. The items of each stage are the input
of the next one, and those of the last stage become the frames of the stream. A stage object serves
one stream. It passes on items that it does not know, such as `Data`.

A worker that continues a stream runs its stages from the beginning and skips the frames that the
ledger has. So a stage should be deterministic: the same items in give the same items out, whatever
the time, the machine or the size of the pieces. The outputs of a stage that is not are stored in
the ledger before they are used (`logged_stage`). The output of a model is not computed again: it is
a stream of its own in the ledger (`inner_stream`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.producer import End, Output

if TYPE_CHECKING:
    from tailrace.origin.pipelines.origin_client import OriginClient


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of a model: a text, or the messages of a conversation.

    A message is (role, content), followed by the tool fields of a `Message` if it has any.
    """

    text: str | None
    messages: tuple[tuple[str | None, ...], ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or the content of each message."""
        if self.text is not None:
            return (self.text,)
        return tuple(message[1] or "" for message in self.messages)

    def with_texts(self, texts: Iterable[str]) -> Prompt:
        """Return a copy with other texts: as many as, and in the order of, the property `texts`."""
        new = tuple(texts)
        if self.text is not None:
            return replace(self, text=new[0])
        pairs = zip(self.messages, new, strict=True)
        return replace(self, messages=tuple((said[0], text, *said[2:]) for said, text in pairs))


Item = Prompt | Output
Items = Iterable[Item] | AsyncIterable[Item]


class StageKind(StrEnum):
    """Where the objects of a stage run."""

    IO = "io"
    """On the event loop of the pipeline's worker, together with all other streams."""
    CPU = "cpu"
    """In processes other than the worker: for work that would block its event loop. A stage of
    this kind must not be asynchronous, and cannot read other streams."""
    GPU = "gpu"
    """In processes like those of `cpu`, each with a device: for stages with a model of their own,
    which `load` loads once for each process."""


class StageOptions(BaseModel):
    """Base class of the options of a stage; an option that is not a field is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def asked_models(self) -> tuple[str, ...]:
        """The names of the models that the stage may ask. `check_pipelines` checks them."""
        return ()


O_co = TypeVar("O_co", bound=StageOptions, covariant=True)


@dataclass(frozen=True, slots=True)
class StageContext:
    """The stream that a stage object serves.

    Attributes:
        name: Name of the stage in its pipeline.
        stream: Id of the stream.
        recipe: The request.
        origin: Connection to the origin, for stages that read other streams; None for a stage of
            kind `cpu` or `gpu`.
        begin: Number of the stage's items before the first one of this object. It is 0, or higher
            if the stage was switched on while the stream ran.
        device: Device of a stage of kind `gpu`, `cuda` or `cpu`, as torch names it. Empty for
            stages of other kinds.
        loaded: What `Stage.load` has returned, for a stage of kind `gpu`.
    """

    name: str
    stream: bytes
    recipe: Recipe
    origin: OriginClient | None
    begin: int = 0
    device: str = ""
    loaded: Any = None

    @property
    def key(self) -> str:
        """A name for what this object stores in the ledger, which other objects do not have."""
        return f"{self.name}~{self.begin}" if self.begin else self.name


class Stage(ABC, Generic[O_co]):
    """Base class of stages. The constructor gets the options and the context of its stream."""

    kind: ClassVar[StageKind] = StageKind.IO
    """Where the objects of this stage run."""
    Options: ClassVar[type[StageOptions]] = StageOptions
    """The options that the stage takes in a settings file."""
    answers_prompts: ClassVar[bool] = False
    """True if the stage replaces a prompt by output. A pipeline needs such a stage."""
    is_deterministic: ClassVar[bool] = True
    """False if the same items in may give other items out, as the answers of a server do. Then the
    outputs are stored in the ledger before they are used (`logged_stage`)."""
    is_repeated: bool = False
    """True while a stage that is not deterministic gets an item whose outputs are known from an
    earlier run. They are ignored, so a question to a server can be left out."""
    takes_input: ClassVar[bool] = False
    """True if the stage works on the bytes that clients send while the stream runs. Such a stage
    gets them as `Data` items of any size, after the prompt."""

    def __init__(self, options: O_co, context: StageContext) -> None:
        """Store the options and the context."""
        self.options = options
        self.context = context

    @classmethod
    def load(cls, options: Any, device: str) -> Any:
        """Load what all objects of a stage of kind `gpu` share: the weights of a model, usually.

        This is called once in each process of the stage, before the worker takes streams; and again
        if the process is lost. `device` is `cuda` or `cpu`. What this returns is `context.loaded`
        of each stage object. If it raises an exception, the worker cannot start.
        """
        return None

    @abstractmethod
    def process(self, item: Item) -> Items:
        """Return the items that replace `item`, which is never an End.

        If one of the returned items is an End, the stream ends, and no item after it is sent. Any
        exception counts as a failure of the stage.
        """

    def finish(self, end: End) -> Items:
        """Return the items to send after the last item of the input; `end` is the input's End.

        If one of the returned items is an End, it replaces `end`. Otherwise `end` follows them.
        """
        return ()

    def close(self, has_ended: bool) -> None:
        """Release resources, because this object gets no more items.

        `has_ended` is True if the stream has ended, or the stage was switched off. Otherwise the
        stages may run again for this stream, with new objects.
        """

    def held(self) -> Iterable[Item]:
        """Return the items that this stage holds back, as it received them.

        If an optional stage fails or is switched off, the pipeline passes them on.
        """
        return ()


AnyStage = Stage[Any]
