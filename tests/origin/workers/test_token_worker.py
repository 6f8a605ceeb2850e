"""The process that runs an engine, and its socket."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tailrace.ledger.frame import FinishReason, Hello, StreamEnd
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.config import OriginConfig
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.workers.liveness import Watchdog
from tailrace.origin.workers.program import program
from tailrace.origin.workers.token_worker import MAX_STEP_BYTES, FrameSocket, steps
from tailrace.origin.workers.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    WORKER,
    ActiveRuns,
    CancelRun,
    Emission,
    Fault,
    Frame,
    Load,
    LoadProgress,
    Ready,
    RunWaits,
    StartRun,
    Step,
    decode,
    encode,
)
from tests.origin.emissions import rows
from tests.origin.engine.runs import continuation, end_of, engine_of, frame_of, make_run
from tests.origin.held_text import FACTORY, PLACE, Brake

HELLO = Hello(SCHEMA_HASH, "test")
SOCKET_TIMEOUT_S = 60.0
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 3, "ignore_eos": True, "max_tokens": 40}


class Supervisor:
    """The other end of a real worker process."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        path = directory / "worker.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(SOCKET_TIMEOUT_S)
            listener.bind(str(path))
            listener.listen()
            given: dict[str, Any] = {"model": model, "model_name": "tiny", "device": "cpu"}
            config = OriginConfig(**(given | settings))
            module, document = program(config)
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(path), document],
                stderr=subprocess.PIPE,
                text=True,
            )
            self.connection, _ = listener.accept()
        self.connection.settimeout(SOCKET_TIMEOUT_S)
        self.frames = self._read()

    def send(self, frame: Frame, corr: int = 0) -> None:
        self.connection.sendall(encode(frame, corr))

    def greet(self) -> Ready:
        self.send(HELLO)
        assert next(self.frames) == Hello(SCHEMA_HASH, "tailrace-worker")
        for frame in self.frames:
            if isinstance(frame, Ready):
                return frame
            assert isinstance(frame, LoadProgress)
        raise AssertionError("the worker went before it was ready")

    def emissions(self, run_id: int) -> Iterator[Emission]:
        """Yield the emissions of one run as they come, to its end."""
        for frame in self.frames:
            if isinstance(frame, Load | ActiveRuns | RunWaits):
                continue
            assert isinstance(frame, Step)
            assert frame.runs
            for emission in rows(frame):
                if emission.run == run_id:
                    yield emission
                    if isinstance(frame_of(emission), StreamEnd):
                        return

    def close(self) -> tuple[int, str]:
        """Close the socket; the worker's exit status and its stderr."""
        self.connection.close()
        _, errors = self.process.communicate(timeout=SOCKET_TIMEOUT_S)
        return self.process.returncode, errors

    def _read(self) -> Iterator[Frame]:
        splitter = FrameSplitter(WORKER, MAX_WORKER_FRAME_BYTES)
        while data := self.connection.recv(1 << 16):
            for raw in splitter.feed(data):
                corr, frame = decode(raw)
                assert corr == 0
                yield frame


@pytest.fixture
def supervisor(tmp_path: Path, checkpoint: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, checkpoint)
    yield supervisor
    supervisor.process.kill()
    supervisor.close()


def test_a_run_that_had_to_wait_for_another_says_so_before_it_ends(
    tmp_path: Path, checkpoint: Path
) -> None:
    supervisor = Supervisor(tmp_path, checkpoint, running_streams=1)
    try:
        supervisor.greet()
        supervisor.send(make_run(**SAMPLED), 1)
        supervisor.send(make_run(**SAMPLED), 2)
        waited: dict[int, int] = {}
        ended: list[int] = []
        while 2 not in ended:
            frame = next(supervisor.frames)
            if isinstance(frame, RunWaits):
                waited |= {one.run: one.waited_ms for one in frame.waits if one.run not in ended}
            elif isinstance(frame, Step):
                ended += [one.run for one in rows(frame) if isinstance(frame_of(one), StreamEnd)]
        assert ended == [1, 2]
        assert waited[2] > waited.get(1, 0)
    finally:
        supervisor.process.kill()
        supervisor.close()


def in_process(model: CpuModel, tokenizer: Tokenizer, run: StartRun) -> list[Emission]:
    engine = engine_of(model, tokenizer)
    engine.add(9, run)
    emissions: list[Emission] = []
    while not engine.idle:
        emissions += engine.step()
    return emissions


def test_it_says_what_it_serves_once_it_is_loaded(supervisor: Supervisor, model: CpuModel) -> None:
    ready = supervisor.greet()
    assert (ready.model, ready.device, ready.context, ready.vocab) == (
        "tiny",
        "cpu torch",
        256,
        300,
    )
    assert ready.fingerprint == model.fingerprint


def test_a_worker_killed_and_replaced_gives_the_same_frames(
    supervisor: Supervisor, model: CpuModel, tokenizer: Tokenizer, checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    expected = in_process(model, tokenizer, make_run(**SAMPLED))
    supervisor.greet()
    supervisor.send(make_run(**SAMPLED), 9)
    emissions = supervisor.emissions(9)
    logged = [next(emissions) for _ in range(8)]
    supervisor.process.kill()

    second = Supervisor(tmp_path_factory.mktemp("second"), checkpoint)
    second.greet()
    second.send(continuation(SAMPLED, logged), 9)
    assert logged + list(second.emissions(9)) == expected
    assert second.close() == (0, "")


def test_it_exits_cleanly_when_the_socket_closes_while_idle(supervisor: Supervisor) -> None:
    supervisor.greet()
    assert supervisor.close() == (0, "")


def test_it_exits_cleanly_when_the_socket_closes_while_generating(
    supervisor: Supervisor,
) -> None:
    supervisor.greet()
    supervisor.send(make_run(**SAMPLED | {"max_tokens": 250}), 1)
    next(supervisor.emissions(1))
    assert supervisor.close() == (0, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_that_chooses_the_cpu_logs_why(tmp_path: Path, checkpoint: Path) -> None:
    worker = Supervisor(tmp_path, checkpoint, device="auto")
    assert worker.greet().device == "cpu torch"
    status, told = worker.close()
    assert status == 0
    assert json.loads(told)["message"] == "device.cpu"
    assert "no NVIDIA GPU" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_that_needs_a_gpu_says_what_is_missing_and_reads_no_checkpoint(
    tmp_path: Path,
) -> None:
    worker = Supervisor(tmp_path, tmp_path / "no-checkpoint", device="cuda")
    worker.send(HELLO)
    *_, fault = worker.frames
    assert isinstance(fault, Fault)
    assert "device: the GPU cannot be used: there is no NVIDIA GPU" in fault.error
    status, told = worker.close()
    assert status == 1
    assert "Traceback" not in told and "set device to cpu" in told


def test_it_exits_cleanly_when_the_socket_closes_before_a_hello(supervisor: Supervisor) -> None:
    assert supervisor.close() == (0, "")


def test_a_run_sent_right_behind_the_hello_is_not_lost(supervisor: Supervisor) -> None:
    supervisor.connection.sendall(encode(HELLO) + encode(make_run(max_tokens=2), 3))
    ready = next(frame for frame in supervisor.frames if isinstance(frame, Ready))
    assert ready.model == "tiny"
    assert end_of(list(supervisor.emissions(3))).total_tokens == 2


def test_it_takes_runs_and_halts_while_generating(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brake = Brake(tmp_path / "held")
    monkeypatch.setenv(PLACE, str(brake.place))
    brake.hold(20)
    supervisor = Supervisor(tmp_path, checkpoint, filter=FACTORY)
    try:
        supervisor.greet()
        supervisor.send(make_run(**SAMPLED | {"max_tokens": 250}), 1)
        next(supervisor.emissions(1))
        supervisor.send(make_run(max_tokens=2), 2)
        supervisor.send(CancelRun(), 1)
        brake.go_on()
        ends: dict[int, FinishReason] = {}
        while len(ends) < 2:
            if isinstance(step := next(supervisor.frames), Step):
                made = [(emission.run, frame_of(emission)) for emission in rows(step)]
                ends |= {run: end.finish_reason for run, end in made if isinstance(end, StreamEnd)}
        assert ends == {1: FinishReason.CANCELLED, 2: FinishReason.LENGTH}
        assert supervisor.close() == (0, "")
    finally:
        supervisor.process.kill()


def test_another_schema_is_refused(supervisor: Supervisor) -> None:
    supervisor.send(Hello(bytes(8), "other"))
    assert list(supervisor.frames) == [Hello(SCHEMA_HASH, "tailrace-worker")]
    status, errors = supervisor.close()
    assert status == 1
    assert "SchemaMismatch" in errors


def test_bytes_that_are_no_frame_are_refused(supervisor: Supervisor) -> None:
    supervisor.greet()
    supervisor.connection.sendall(b"\xff" * 64)
    assert list(supervisor.frames) == [Fault("FrameError", "crashed")]
    status, errors = supervisor.close()
    assert status == 1
    assert "FrameError" in errors


def test_a_checkpoint_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, tmp_path / "nothing")
    supervisor.send(HELLO)
    hello, *_, fault = supervisor.frames
    assert hello == Hello(SCHEMA_HASH, "tailrace-worker")
    assert isinstance(fault, Fault)
    status, errors = supervisor.close()
    assert status == 1
    assert fault.error in errors
    assert "ModelError" in errors
    assert "config.json" in errors


def test_a_socket_that_is_not_there_is_named(tmp_path: Path, checkpoint: Path) -> None:
    module, settings = program(OriginConfig(model=checkpoint))
    done = subprocess.run(
        [
            *(sys.executable, "-m", module, tmp_path / "no", settings),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr


def test_a_step_that_never_ends_ends_the_worker_with_a_traceback(
    tmp_path: Path, checkpoint: Path
) -> None:
    settings = {"filter": "tests.origin.stuck_filter:make", "worker_silence_s": 2}
    supervisor = Supervisor(tmp_path, checkpoint, **settings)
    try:
        supervisor.greet()
        supervisor.send(make_run(), 1)
        assert ActiveRuns((1,)) in list(supervisor.frames)
        status, errors = supervisor.close()
    finally:
        supervisor.process.kill()
    assert status == 1
    assert "stuck_filter.py" in errors and "in check" in errors


class Rests(Watchdog):
    """Notes when it is off."""

    def __init__(self) -> None:
        super().__init__(60, 60)
        self.rests = 0
        self.began = threading.Event()

    @contextmanager
    def resting(self) -> Iterator[None]:
        self.rests += 1
        self.began.set()
        yield


def test_a_worker_may_wait_for_its_supervisor_as_long_as_it_takes() -> None:
    step = Step.of((Emission(1, 0, (), (), bytes(MAX_STEP_BYTES)),))
    watchdog = Rests()
    ours, theirs = socket.socketpair()

    def receive() -> bytes:
        assert watchdog.began.wait(SOCKET_TIMEOUT_S)
        return theirs.recv(len(encode(step)), socket.MSG_WAITALL)

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        FrameSocket(ours, watchdog).send(step)
        assert received.result(SOCKET_TIMEOUT_S) == encode(step)
    assert watchdog.rests == 1


def test_many_long_emissions_go_in_several_steps_but_no_run_is_torn() -> None:
    emissions = [Emission(run, at, (1, 2), (), b"x" * 1000) for at in range(3) for run in (1, 2, 3)]
    split = list(steps(emissions, max_bytes=7000))
    assert [[e.run for e in rows(step)] for step in split] == [[1, 1, 1, 2, 2, 2], [3, 3, 3]]
    assert [e.index for e in rows(split[1])] == [0, 1, 2]
    assert list(steps([])) == []
    assert list(steps(emissions[:1], max_bytes=1)) == [Step.of((emissions[0],))]
