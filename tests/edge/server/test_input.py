"""Input is worked off in slices, in turn, and a limited time of each turn of the event loop."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.edge.server.input import TURN_S, InputTurns


class Client:
    """A connection with `slices` slices of input, each of which takes `slice_s`."""

    def __init__(self, name: str, slices: int, loop: Loop, slice_s: float = 0.0) -> None:
        self.in_line = False
        self.slices = slices
        self._name = name
        self._loop = loop
        self._slice_s = slice_s

    def take_slice(self) -> bool:
        self.slices -= 1
        self._loop.log.append(self._name)
        self._loop.now += self._slice_s
        return self.slices > 0


class Loop:
    """The parts of an event loop that are used: a clock, and calls in the next turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.soon: list[Callable[[], None]] = []
        self.input = InputTurns(lambda: self.now, self.soon.append)

    def turn(self) -> None:
        soon, self.soon[:] = list(self.soon), []
        for act in soon:
            act()


def test_little_input_is_worked_off_in_the_call_that_brings_it() -> None:
    loop = Loop()
    loop.input.add(Client("a", 3, loop))
    assert (loop.log, loop.soon) == (["a"] * 3, [])


def test_after_its_time_the_rest_waits_for_the_next_turn_of_the_loop() -> None:
    loop = Loop()
    loop.input.add(Client("flood", 5, loop, TURN_S))
    assert loop.log == ["flood"]
    for done in range(2, 6):
        assert len(loop.soon) == 1
        loop.turn()
        assert loop.log == ["flood"] * done


def test_connections_take_turns_and_none_gets_a_time_of_its_own() -> None:
    loop = Loop()
    for name in ("a", "b", "c"):
        loop.input.add(Client(name, 2, loop, TURN_S))
    assert loop.log == ["a"]  # the others came in the same turn, whose time was spent
    for _ in range(5):
        loop.turn()
    assert loop.log == ["a", "a", "b", "c", "b", "c"]  # the second "a" was in line before "b" came


def test_small_pieces_of_many_connections_add_up() -> None:
    loop = Loop()
    clients = [Client(str(number), 1, loop, TURN_S / 4) for number in range(6)]
    for client in clients:
        loop.input.add(client)
    assert loop.log == ["0", "1", "2", "3"]
    loop.turn()
    assert [client.slices for client in clients] == [0] * 6


def test_what_is_released_within_a_call_is_worked_off_in_a_later_turn() -> None:
    loop = Loop()
    loop.input.add_later(Client("a", 1, loop))
    assert loop.log == []
    loop.turn()
    assert loop.log == ["a"]
