"""The command that shows what a setting does: its figures are those of the simulated runs."""

from __future__ import annotations

import json
import re

import pytest

from tailrace.ledger.wire.schema import Priority
from tests.bench.simulate_scheduler import Load, figures, main
from tests.origin.scheduler.scheduler_simulator import Arrival, Outcome

SMALL = "--seconds 2 --load interactive=5,100,20 --load batch=2,300,40".split()


def test_it_prints_a_row_for_each_class_and_ends_with_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(SMALL)
    *shown, last = capsys.readouterr().out.splitlines()
    assert sum(line.strip().startswith(("interactive", "batch")) for line in shown) == 2
    result = json.loads(last)
    assert result["interactive"]["runs"] > 0
    assert result["interactive"]["ttft_p50_ms"] <= result["interactive"]["ttft_p99_ms"]
    assert "standard" not in result


def test_the_same_seed_gives_the_same_figures_and_another_one_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for seed in ("1", "1", "2"):
        main([*SMALL, "--seed", seed])
        # The last line has the machine's load, too, which is another one in the next run.
        printed.append(re.sub(r'"load": [\d.]+', "", capsys.readouterr().out))
    assert printed[0] == printed[1] != printed[2]


def test_figures_are_milliseconds_from_arrival_and_between_tokens() -> None:
    arrival = Arrival(1.0, Priority.BATCH, [1], 3, 3)
    outcome = Outcome(arrival, times=[1.5, 1.6, 1.9])
    row = figures([outcome, Outcome(arrival, refused=True)], 2.0)
    assert (row["runs"], row["refused"], row["tokens_per_s"]) == (2, 1, 1.5)
    assert (row["ttft_p50_ms"], row["itl_p50_ms"], row["itl_p99_ms"]) == (500, 300, 300)
    assert figures([], 1.0)["ttft_p50_ms"] is None


@pytest.mark.parametrize(
    "text", ["urgent=1,1,1", "batch=1,1", "batch=0,1,1", "batch", "batch=a,1,1"]
)
def test_a_load_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Load.parse(text)
