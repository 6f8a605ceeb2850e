"""What an edge's wrangler file says to an origin: which classes of objects there are, and crons.

Told whole whenever an edge meets an origin, which carries out what is new
(`origin/objects.py`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.ledger.validation import invalid_document

DEPLOYMENT = "deployment"
"""The class of the objects that keep deployments, each by the name of its script."""
MAX_NAME_CHARS = 128
"""Of a script, a tag and a class: all three are parts of an object's class here."""
MAX_STEPS = 1000
MAX_CRONS = 100

Word = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Renamed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    before: Word = Field(alias="from")
    after: Word = Field(alias="to")


class Migration(BaseModel):
    """One step; the names are those of wrangler's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tag: Word
    new_sqlite_classes: tuple[Word, ...] = ()
    renamed_classes: tuple[Renamed, ...] = ()
    deleted_classes: tuple[Word, ...] = ()


class Deployment(BaseModel):
    """`bindings` are names of classes by what routes call them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    script: Word
    bindings: dict[str, Word]
    migrations: Annotated[tuple[Migration, ...], Field(max_length=MAX_STEPS)] = ()
    crons: Annotated[tuple[str, ...], Field(max_length=MAX_CRONS)] = ()

    @classmethod
    def parse(cls, body: bytes) -> Deployment:
        """Return the deployment that a body describes. Raises CallerError."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise invalid_document(error, whole="body") from None

    def encoded(self) -> bytes:
        return self.model_dump_json(by_alias=True).encode()

    def called(self, binding: str) -> str:
        """The class of objects of a Call to what is bound by that name."""
        return f"{self.script}/{self.bindings[binding]}"
