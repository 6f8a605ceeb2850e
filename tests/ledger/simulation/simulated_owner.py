"""The object of the simulation: it counts, and its stream is as long as it says."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.ledger.errors import StaleEpoch
from tailrace.ledger.frame import Token, encode
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite, Record
from tests.ledger.simulation.simulated_life import Life
from tests.ledger.simulation.simulated_world import require

COUNTER = ObjectKey("counter", "the one")


class Owner:
    """An owner of the counter; there may be others at the same time."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def count(self) -> None:
        """Own the counter for a while, perhaps with a rival that claims it too."""
        objects = self._life.ledger.objects
        await self._life.pause(2)
        self._life.owners += 1
        epoch = (await objects.claim(COUNTER)).epoch
        values: Mapping[str, bytes] = await objects.get(COUNTER, ["n", "round"])
        n, of_round = int(values.get("n", b"0")), int(values.get("round", b"0"))
        for _ in range(self._life.random.randint(1, 6)):
            if self._life.owners == 1:
                await self._require_agreement(n, of_round)
            write, n, of_round = self._count_on(epoch, n, of_round, begun=bool(values))
            values = write.puts
            try:
                await objects.write(write)
            except StaleEpoch:
                require(not await objects.owns(COUNTER, epoch), "an object's owner was fenced")
                require(self._life.owners > 1, "an object's owner was fenced by nobody")
                return
            self._life.world.counted(n, of_round)
            await self._life.pause()

    def _count_on(
        self, epoch: int, n: int, of_round: int, *, begun: bool
    ) -> tuple[ObjectWrite, int, int]:
        """Return the next write: one more, or a new stream in the old one's place."""
        counter, creates, drops = self._life.world.counter, list[NewStream](), list[bytes]()
        anew = not begun or self._life.random.random() < 0.2
        if anew:
            drops = [counter.stream(of_round)] if begun else []
            n, of_round = 0, of_round + 1
            creates = [counter.new(of_round)]
        record = Record(encode(Token("x", n)), (n,))
        write = ObjectWrite(
            COUNTER,
            epoch,
            puts={"n": b"%d" % (n + 1), "round": b"%d" % of_round},
            clear=anew,
            creates=creates,
            appends=[Append(counter.stream(of_round), 1, n, record)],
            drops=drops,
            durability=counter.durability,
        )
        return write, n + 1, of_round

    async def _require_agreement(self, n: int, of_round: int) -> None:
        if of_round:
            info = await self._life.ledger.info(self._life.world.counter.stream(of_round))
            require(info.next_index <= n, "an object's stream is ahead of its values")
