"""The models of a pool: what is said of each, and what of that no pool can do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ledger.errors import ConfigError
from origin.pool.schedule import Schedule
from origin.warm.policies import LOAD_S

LEAST_SIZE = 1e-6
"""What a model that takes nothing of its device counts as, where something is divided by it."""


@dataclass(frozen=True)
class PoolMember:
    """A model of the pool. `size` is what it takes of its device's cap, in the cap's unit.

    `load_s` is how long a load is taken to take until one was measured.
    """

    name: str
    size: float = 1.0
    device: str = "cpu"
    load_s: float = LOAD_S
    is_pinned: bool = False
    schedules: tuple[Schedule, ...] = ()


def check_members(
    members: Sequence[PoolMember], caps: Mapping[str, float], policies: Iterable[str]
) -> None:
    """What no pool can do is refused before it begins; raises ConfigError."""
    names = [one.name for one in members]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name!r}", field="models")
    for name in set(policies) - set(names):
        raise ConfigError(f"no model is called {name!r}", field="policy", hint=", ".join(names))
    for device, cap in caps.items():
        here = [one for one in members if one.device == device]
        for one in here:
            if not one.size >= 0:
                raise ConfigError(f"{one.size:g} is to be zero or more", field=f"models.{one.name}")
            if one.size > cap:
                raise ConfigError(
                    f"{one.name!r} takes {one.size:g} of {device}, whose cap is {cap:g}",
                    field="memory",
                    hint="a cap that holds the largest model",
                )
    check_pins(members, caps, {one.name for one in members if one.is_pinned})


def check_pins(
    members: Sequence[PoolMember], caps: Mapping[str, float], pinned: Collection[str]
) -> None:
    """Beside what is pinned there is to be room for each of the others, one at a time."""
    for device, cap in caps.items():
        here = [one for one in members if one.device == device]
        taken = sum(one.size for one in here if one.name in pinned)
        for one in here:
            if (one.name not in pinned and taken + one.size > cap) or taken > cap:
                raise ConfigError(
                    f"pinned models take {taken:g} of {device}, whose cap is {cap:g}, and"
                    f" {one.name!r} takes {one.size:g}",
                    field="pin",
                    hint="pin fewer, or raise the cap",
                )
