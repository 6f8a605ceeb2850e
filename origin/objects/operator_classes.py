"""Loads the operator's own classes of objects, which the setting `origin.objects` names."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.objects.object import DurableObject
from tailrace.origin.plugin import load_plugin

FIELD = "origin.objects"

SHAPE = "write MODULE:CLASS, where CLASS is a tailrace.ledger.objects.object.DurableObject"

Classes = Mapping[str, type[DurableObject]]


def load_classes(specs: tuple[str, ...]) -> dict[str, type[DurableObject]]:
    """Return the operator's classes by name; raises ConfigError if one cannot be loaded."""
    found: dict[str, type[DurableObject]] = {}
    for spec in specs:
        made, (module, _, name) = load_plugin(spec, FIELD, SHAPE), spec.partition(":")
        if not (isinstance(made, type) and issubclass(made, DurableObject)):
            why = f"{module} has no subclass of DurableObject with the name {name}"
            raise ConfigError(why, field=FIELD, hint=SHAPE)
        if name in found:
            raise ConfigError(f"two classes have the name {name}", field=FIELD)
        found[name] = made
    return found
