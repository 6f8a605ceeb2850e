"""The priority class that an API key is bound to, and how it limits the requests of this key.

A request of a bound key has the key's class by default. The request may ask for a less urgent
class, but not for a more urgent one.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from tailrace.ledger.errors import Forbidden
from tailrace.ledger.frame import Open, Priority

bound_class: ContextVar[Priority | None] = ContextVar("bound_class", default=None)
"""The priority class that the key of the running HTTP request is bound to; None for no class."""


def class_for(asked: Priority | None, bound: Priority | None) -> Priority:
    """Return the priority class of a request.

    `asked` is the class in the request, or None if the request names no class. `bound` is the class
    that the request's key is bound to, if any.

    Raises:
        Forbidden: The request asks for a class that is more urgent than the key's.
    """
    if asked is None:
        return Priority.STANDARD if bound is None else bound
    if bound is not None and asked < bound:
        raise Forbidden(
            f"this API key is bound to the class {bound.word!r}, and {asked.word!r} is more urgent",
            code="class_not_allowed",
            field="priority",
            hint=f"leave out priority, or use {_words_from(bound)}",
        )
    return asked


def with_class(wanted: Open, bound: Priority | None) -> Open:
    """Return a client's Open frame with the priority class that the request gets.

    An Open always contains a class, so STANDARD, the default, counts as if no class was requested.

    Raises:
        Forbidden: The frame asks for a class that is more urgent than the key's.
    """
    if bound is None:
        return wanted
    asked = None if wanted.priority is Priority.STANDARD else wanted.priority
    return replace(wanted, priority=class_for(asked, bound))


def _words_from(bound: Priority) -> str:
    return " or ".join(repr(each.word) for each in Priority if each >= bound)
