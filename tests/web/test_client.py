"""The browser's client without connections: its codec, its rules, its types."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from tests.npm import installed
from tests.schema_text import ROOT

HERE = Path(__file__).parent
PACKAGE = ROOT / "edge/web/tailrace"
PATIENCE_S = 120


def run(*command: str | Path) -> str:
    """What a command says; it has to succeed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("suite", ["wire.test.js", "core.test.js"])
def test_in_node(suite: str) -> None:
    """The vectors by the codec; the rules of a reader."""
    installed(HERE)
    run("node", "--test", suite)


def test_the_clients_types_hold() -> None:
    run(installed(HERE) / "tsc", "-p", HERE)


USER = """
import { resume, stream, type Options, TailraceError } from "tailrace";
import { useStream } from "tailrace/react";
import { smooth } from "tailrace/smooth";
import { decode } from "tailrace/wire";

const input = { model: "demo", prompt: "" };
const options: Options = { input, onState: (state) => state === "open" };
export async function read(storage: Storage): Promise<string> {
  const reading = resume("/v1/generate", { storage }) ?? stream("/v1/generate", options);
  for await (const frame of reading) {
    if (frame.type === "Token") frame.text.toUpperCase();
    // @ts-expect-error: not every frame has a text
    frame.text;
  }
  for await (const text of smooth(reading, { off: true })) text.length;
  const { frame } = decode(new Uint8Array());
  if (frame.type === "StreamEnd") throw new TailraceError(frame.finish_reason);
  // @ts-expect-error: a text
  options.apiKey = 7;
  return useStream(reading, smooth).text;
}
"""


def test_who_writes_typescript_is_helped(tmp_path: Path) -> None:
    commands = installed(HERE)
    package = tmp_path / "node_modules/tailrace"
    run("cp", "-r", PACKAGE, package.parent.parent / "tailrace")
    package.parent.mkdir()
    (tmp_path / "tailrace").rename(package)
    made = ("--noEmit", "false", "--declaration", "--emitDeclarationOnly")
    run(commands / "tsc", "-p", HERE, *made, "--outDir", package / "types")
    run("cp", PACKAGE / "schema.d.ts", package / "types")
    (tmp_path / "node_modules/@types").symlink_to(HERE / "node_modules/@types")
    (tmp_path / "user.ts").write_text(USER)
    strict = ("--strict", "--noEmit", "--target", "es2022", "--lib", "es2022,dom,dom.asynciterable")
    how = ("--module", "esnext", "--moduleResolution", "bundler", "--types", "")
    run(commands / "tsc", "--ignoreConfig", *strict, *how, tmp_path / "user.ts")


MOST_BYTES = 8 << 10
LOADED = ("index.min.js", "chunk.min.js", "schema.js")
"""What a page loads that imports the first. The rest comes when a WebSocket is wanted."""


def test_what_a_page_loads_is_current_and_small(tmp_path: Path) -> None:
    """Else, in tests/web: npm run build"""
    installed(HERE)
    run("npm", "run", "--silent", "build", "--", f"--outdir={tmp_path}")
    built = sorted(path.name for path in tmp_path.iterdir())
    assert built == sorted(path.name for path in PACKAGE.glob("*.min.js"))
    for name in built:
        assert (tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes(), name
    imported = re.findall(r'from"\./([^"]+)"', "".join(map(_text, LOADED)))
    assert set(imported) | {LOADED[0]} == set(LOADED)
    sizes = {name: len(gzip.compress((PACKAGE / name).read_bytes(), 9)) for name in LOADED}
    assert sum(sizes.values()) < MOST_BYTES, sizes


def _text(name: str) -> str:
    return (PACKAGE / name).read_text("utf-8")
