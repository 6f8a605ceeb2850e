"""`tailrace up` with its real children: what it prints, restarts and leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tailrace.client import Client
from tailrace.ledger.frame import Token
from tailrace.up import NO_SAMPLE, ORIGIN_START_S, why_not_ready

TIMEOUT_S = 60.0
ANY_PORTS = ("--http-port", "0", "--https-port", "0", "--link-port", "0")


@contextmanager
def tailrace_up(
    data: Path, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Yield the running command and its ready line; killed if the test leaves it running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", "up", "--data", str(data), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def lines_until(stream: IO[str] | None, last: str) -> Iterator[str]:
    assert stream is not None
    for line in stream:
        yield line
        if line.rstrip() == last:
            return


async def generate(url: str) -> str:
    async with Client([url], patience_s=TIMEOUT_S) as client:
        stream = client.generate(prompt="Once upon a time", max_tokens=8, seed=1)
        return "".join([frame.text async for frame in stream if isinstance(frame, Token)])


def read_to_end(connection: socket.socket) -> None:
    """Return when the peer is gone, whether it said goodbye or not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass


def test_up_shows_a_sample_replaces_an_edge_that_dies_and_stops_when_told(tmp_path: Path) -> None:
    with tailrace_up(tmp_path, *ANY_PORTS) as (process, ready):
        assert ready["ready"] is True
        shown = "".join(lines_until(process.stderr, "Ctrl-C stops it."))
        text = asyncio.run(generate(ready["http"]))
        assert text

        os.kill(ready["pids"]["edge"], signal.SIGKILL)
        assert asyncio.run(generate(ready["http"])) == text

        process.terminate()
        _, shown_later = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "no link" not in shown
    assert f"curl -N {ready['http']}/v1/generate" in shown
    assert f"⟨cut after 24 tokens · resumed on {ready['http']}, from index 24⟩" in shown
    assert "the edge was ended by SIGKILL; starting it again" in shown_later
    assert (tmp_path / "ledger.db").is_file()


def test_with_api_keys_up_shows_how_to_send_one_and_needs_one_for_its_sample(
    tmp_path: Path,
) -> None:
    keys = str(tmp_path / "keys.json")
    added = subprocess.run(
        [sys.executable, "-m", "tailrace.cli", "key", "add", "web", "--keys", keys],
        capture_output=True,
        text=True,
        check=True,
    )
    for key, sampled in (("", False), (added.stdout.strip(), True)):
        environment = {"TAILRACE_EDGE_API_KEYS": keys, "TAILRACE_API_KEY": key}
        with tailrace_up(tmp_path, *ANY_PORTS, **environment) as (process, _):
            shown = "".join(lines_until(process.stderr, "Ctrl-C stops it."))
        assert '-H "Authorization: Bearer $TAILRACE_API_KEY"' in shown
        assert "OPENAI_API_KEY=$TAILRACE_API_KEY" in shown
        assert "no_origin" not in shown
        assert (NO_SAMPLE in shown) is not sampled
        assert ("⟨cut after 24 tokens" in shown) is sampled


def test_nothing_that_up_started_outlives_a_sigkill_of_it(tmp_path: Path) -> None:
    with tailrace_up(tmp_path, "--no-sample", *ANY_PORTS) as (process, ready):
        host, port = ready["link"].split(":")
        edge = urlsplit(ready["http"])
        to_origin = socket.create_connection((host, int(port)), TIMEOUT_S)
        to_edge = socket.create_connection((edge.hostname, edge.port), TIMEOUT_S)
        with to_origin, to_edge:
            process.kill()
            read_to_end(to_edge)
            read_to_end(to_origin)


def test_a_missing_link_is_shown_once_the_origin_has_had_time_to_start() -> None:
    origin: dict[str, Any] = {"origin": "127.0.0.1:9", "up": False, "ready": False}
    no_link = "no link to the origin at 127.0.0.1:9"
    answer = {"ready": False, "reasons": [no_link], "origins": [origin]}
    assert why_not_ready(None, 0.0) == "starting the edge"
    assert why_not_ready(answer, ORIGIN_START_S - 1) == "starting the origin"
    assert why_not_ready(answer, ORIGIN_START_S) == no_link

    loading = answer | {"reasons": ["the model loads"], "origins": [origin | {"up": True}]}
    assert why_not_ready(loading, 0.0) == "the model loads"


def test_a_port_in_use_ends_up_with_the_flag_that_chooses_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "tailrace.cli",
                "up",
                "--http-port",
                port,
                "--data",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    assert f"error: --http-port: port {port} is in use" in result.stderr
    assert list(tmp_path.iterdir()) == []


def up_refused(data: Path, *arguments: str) -> str:
    """Run `tailrace up` with flags that are wrong; return the line that it prints."""
    result = subprocess.run(
        [sys.executable, "-m", "tailrace.cli", "up", "--data", str(data), *ANY_PORTS, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and not data.exists(), result
    [line] = result.stderr.splitlines()
    return line


def test_up_ends_with_the_message_about_a_damaged_ledger(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    file.write_bytes(b"no database " * 1000)
    result = subprocess.run(
        [sys.executable, "-m", "tailrace.cli", "up", "--data", str(tmp_path), *ANY_PORTS],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert result.returncode != 0
    *_, launcher, last = result.stderr.splitlines()
    assert launcher == "error: the origin ended with exit code 2"
    assert f"{file}: file is not a database" in last


def test_up_in_front_of_a_server_cuts_and_resumes_a_sample_of_it(tmp_path: Path) -> None:
    with tailrace_up(tmp_path / "server", "--no-sample", *ANY_PORTS) as (_, server):
        url = f"{server['http']}/v1"
        front = ("--upstream", url, *ANY_PORTS)
        with tailrace_up(tmp_path / "front", *front) as (process, ready):
            assert (ready["models"], ready["upstream"]) == (["demo"], url)
            shown = "".join(lines_until(process.stderr, "Ctrl-C stops it."))
            with openai.OpenAI(base_url=f"{ready['http']}/v1", api_key="unused") as client:
                turn = {"role": "user", "content": "Tell me a story about a fox."}
                answer = client.chat.completions.with_raw_response.create(
                    model="demo", messages=[cast(Any, turn)], max_tokens=40, stream=True, seed=3
                )
                with answer.parse() as chunks:  # the connection is cut in the middle
                    head = list(islice(chunks, 12))
                last = (head[-1].model_extra or {})["sequence_number"]
                stream = answer.headers["tailrace-stream"]
                rest = client.get(
                    f"/chat/completions/{stream}",
                    options={"params": {"stream": True, "starting_after": last}},
                    cast_to=ChatCompletionChunk,
                    stream=True,
                    stream_cls=openai.Stream[ChatCompletionChunk],
                )
                text = "".join(text_of(chunk) for chunk in [*head, *rest])
                whole = client.get(f"/chat/completions/{stream}", cast_to=ChatCompletion)
        assert text and text == whole.choices[0].message.content
        assert f"⟨cut after 24 tokens · resumed on {ready['http']}, from index 24⟩" in shown
        assert f"serves demo of {url}" in shown
        assert f"export OPENAI_BASE_URL={ready['http']}/v1" in shown

        data = tmp_path / "nothing"
        assert "did you mean demo?" in up_refused(data, *front, "--model", "dem")
        assert f"--upstream {url}" in up_refused(data, "--upstream", server["http"])
    assert "no OpenAI-compatible server answers" in up_refused(data, *front)


def text_of(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = tmp_path / "file" / "data"
    assert f"error: --data: cannot write to {data}: Not a directory" in up_refused(data)


def test_models_and_keys_are_flags_of_an_upstream_server(tmp_path: Path) -> None:
    assert "--model: needs --upstream" in up_refused(tmp_path / "data", "--model", "demo")
    key = up_refused(tmp_path / "data", "--api-key-env", "PATH")
    assert "--api-key-env: needs --upstream" in key
