"""Errors as HTTP tells them: one JSON shape, whoever answers."""

from __future__ import annotations

from ledger.errors import TailraceError

ErrorFields = dict[str, str | bool]


def error_body(error: TailraceError) -> dict[str, ErrorFields]:
    """The JSON document of an error: the fields of a StreamError that mean something here."""
    fields: ErrorFields = {"code": error.code, "message": error.message}
    if error.field is not None:
        fields["field"] = error.field
    if error.hint is not None:
        fields["hint"] = error.hint
    fields["retryable"] = error.retryable
    return {"error": fields}
