"""Which worker gets which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from tailrace.origin import start
from tailrace.origin.config import OriginConfig
from tailrace.origin.gpu.listing import visible_gpus
from tailrace.origin.gpu.placement import gpu_environment, named_gpus, place
from tailrace.origin.start import slots_of
from tailrace.origin.workers import program
from tailrace.origin.workers.program import gpus_of

EIGHT = tuple(map(str, range(8)))


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("0,1", ("0", "1")),
        (" 3 , GPU-8932f937 ", ("3", "GPU-8932f937")),
        ("0,-1,2", ("0",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_a_variable_names_gpus_as_cuda_reads_it(value: str, gpus: tuple[str, ...]) -> None:
    assert named_gpus(value) == gpus


def test_eight_workers_get_eight_gpus_and_a_ninth_shares_one() -> None:
    assert place([1.0] * 8, EIGHT, {}) == [*EIGHT]
    assert sorted(place([1.0] * 9, EIGHT, {})) == sorted([*EIGHT, "0"])


def test_models_take_the_gpus_on_which_least_is_planned() -> None:
    held = {"0": 40.0, "1": 10.0}
    assert place([20.0], ("0", "1", "2"), held) == ["2"]
    assert place([20.0] * 2, ("0", "1", "2"), held) == ["2", "1"]
    assert place([20.0] * 4, ("0", "1"), held) == ["1", "0", "1", "0"]


def test_gpus_are_counted_and_not_numbered_by_their_files(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, tmp_path) == ("GPU-a", "GPU-b")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({}, tmp_path / "none") == ()


def test_a_worker_sees_its_gpu_by_the_order_of_the_bus_unless_the_operator_chose_another() -> None:
    assert gpu_environment(None, {}) == {}
    assert gpu_environment("3", {}) == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    for own in ({"CUDA_VISIBLE_DEVICES": "3,1"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        assert gpu_environment("3", own) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_settings_name_gpus_for_models_of_our_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "visible_gpus", lambda: EIGHT)
    assert gpus_of(OriginConfig(device="cuda")) == EIGHT
    assert gpus_of(OriginConfig(device="auto", gpus=("0", "5"))) == ("0", "5")
    assert gpus_of(OriginConfig(device="cpu")) == ()
    assert gpus_of(OriginConfig(producer="a:b")) == ()
    assert gpus_of(OriginConfig(upstream="http://127.0.0.1:1/v1")) == ()


@pytest.mark.parametrize("given", [[0, 1], ["0", "1"], "0, 1"])
def test_gpus_may_be_numbers_or_one_text(given: object) -> None:
    assert OriginConfig.model_validate({"gpus": given}).gpus == ("0", "1")


def test_workers_that_share_a_gpu_without_a_limit_of_their_caches_are_warned_of() -> None:
    cases: list[tuple[dict[str, int], list[str]]] = [
        ({}, ["gpu.shared"]),
        ({"kv_mib": 512}, []),
        ({"workers": 2}, []),
    ]
    for more, events in cases:
        config = OriginConfig(device="cuda", workers=3, gpus=("0", "1")).model_copy(update=more)
        with structlog.testing.capture_logs() as logged:
            placed = start._gpus_of_workers(config)
        assert [one["event"] for one in logged] == events
        assert list(placed) == ["0", "1", "0"][: config.workers]
    assert start._gpus_of_workers(OriginConfig(device="cpu")) == ()


def test_slots_are_made_with_the_gpus_of_their_workers() -> None:
    slots = slots_of("m", OriginConfig(workers=3), None, 4, ("0", "1", "0"))
    assert [(slot.number, slot.gpu) for slot in slots] == [(4, "0"), (5, "1"), (6, "0")]
    assert [slot.gpu for slot in slots_of("m", OriginConfig(workers=2), None, 0)] == [None, None]
