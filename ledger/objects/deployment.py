"""The deployment of an edge's wrangler file: classes of objects, bindings, migrations and crons.

An edge sends its whole deployment whenever it connects to an origin. The origin applies the
migrations and crons that are new (`origin/objects/deployments.py`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.ledger.validation import invalid_document

DEPLOYMENT = "deployment"
"""Class of the objects that store deployments; each is named like the script that it deploys."""
MAX_NAME_CHARS = 128
"""Maximum characters in the name of a script, a tag or a class.

An object's class consists of a script's name and a class's name, and has a maximum length itself.
"""
MAX_STEPS = 1000
MAX_CRONS = 100

Word = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Renamed(BaseModel):
    """A renamed class."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    before: Word = Field(alias="from")
    after: Word = Field(alias="to")


class Migration(BaseModel):
    """A migration, with the field names of a wrangler file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tag: Word
    new_sqlite_classes: tuple[Word, ...] = ()
    renamed_classes: tuple[Renamed, ...] = ()
    deleted_classes: tuple[Word, ...] = ()


class Deployment(BaseModel):
    """The deployment of one script. `bindings` maps names in routes to classes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    script: Word
    bindings: dict[str, Word]
    migrations: Annotated[tuple[Migration, ...], Field(max_length=MAX_STEPS)] = ()
    crons: Annotated[tuple[str, ...], Field(max_length=MAX_CRONS)] = ()

    @classmethod
    def parse(cls, body: bytes) -> Deployment:
        """Parse the body of a request.

        Raises:
            CallerError: The body is invalid.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise invalid_document(error, whole="body") from None

    def encoded(self) -> bytes:
        return self.model_dump_json(by_alias=True).encode()

    def called(self, binding: str) -> str:
        """Return SCRIPT/CLASS for the class that a binding names, as `Call.object` needs it."""
        return f"{self.script}/{self.bindings[binding]}"
