"""How much memory is left, as the kernel says it."""

from __future__ import annotations

from pathlib import Path

from tailrace.origin.supervisor import free_memory

MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"


def test_the_lesser_of_machine_and_group_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert free_memory(meminfo, tmp_path) == 0.4
    (tmp_path / "memory.current").write_text("950\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 50\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 0.4
    (tmp_path / "memory.max").write_text("1000\n")
    assert round(free_memory(meminfo, tmp_path), 3) == 0.1


def test_where_nothing_is_known_nothing_is_feared(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none", tmp_path) == 1.0
    assert 0.0 <= free_memory() <= 1.0
