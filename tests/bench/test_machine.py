"""Every bench says which machine and which Python it ran on."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.python_build import Built, python_build
from tests.bench.machine import cpu, print_line

BENCHES = Path(__file__).parent
# The bench that starts them reads what they print; and this file is none.
PARTS = {"bench_ledger_cold.py", "bench_ledger_memory.py", "restore_floor.py", Path(__file__).name}


def test_a_line_names_the_machine_and_the_python(capsys: pytest.CaptureFixture[str]) -> None:
    print_line({"figure_us": 1.5}, replace(python_build(), pgo=Built.YES, debug=False))
    said = capsys.readouterr()
    line = json.loads(said.out)
    assert (line["figure_us"], line["cpu"], line["comparable"]) == (1.5, cpu(), True)
    assert line["python"]["version"] == platform.python_version()
    assert line["python"]["pgo"] == "yes"
    assert said.err == ""


@pytest.mark.parametrize("pgo", [Built.NO, Built.UNKNOWN])
def test_a_run_without_a_known_optimised_build_is_not_comparable(
    pgo: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    print_line({}, replace(python_build(), pgo=pgo, debug=False))
    said = capsys.readouterr()
    assert json.loads(said.out)["comparable"] is False
    assert said.err.startswith("not comparable: Python ")


def test_every_bench_prints_its_line_with_them() -> None:
    programs = [
        path
        for path in BENCHES.glob("*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8") and path.name not in PARTS
    ]
    assert len(programs) > 15
    texts = {path.name: path.read_text("utf-8") for path in programs}
    assert [name for name, text in texts.items() if "print(json.dumps(" in text] == []
    # The ledger's bench leaves the line to its report.
    says = ("print_line(", "report.print(")
    assert [name for name, text in texts.items() if not any(call in text for call in says)] == []
