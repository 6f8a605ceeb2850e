"""The browser's client as npm packs it, in a project that has nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Route, async_playwright

from tests.e2e.browser import program
from tests.e2e.processes import Edge, Origin, running
from tests.npm import installed
from tests.sdks.conftest import done
from tests.web.test_client import HERE, PACKAGE, run

pytestmark = pytest.mark.anyio

SDKS = HERE.parent / "sdks"
STEER = " And then a whale came"
USER = """
import { resume, stream, type Options, TailraceError } from "tailrace";
import { TailraceChatTransport } from "tailrace/ai-sdk";
import { useStream } from "tailrace/react";
import { branch, regenerate } from "tailrace/branch";
import { chatUrl, follow, stopChat } from "tailrace/chats";
import { smooth } from "tailrace/smooth";
import { GRANULARITIES, Pace, paced } from "tailrace/pace";
import { announcer } from "tailrace/announcer";
import { MarkdownText, markdownInto, plainText } from "tailrace/markdown";
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
  const pace = new Pace({ wordsPerMinute: 240, granularity: GRANULARITIES[1] });
  for await (const text of paced(reading, pace)) announcer(document.body).update(text, pace.isDone);
  useStream(reading, (one) => paced(one, pace));
  markdownInto(document.body)(plainText(new MarkdownText().update("*")));
  const [block] = new MarkdownText().update("*");
  const nodes: readonly (string | { tag: string })[] = block?.nodes ?? [];
  nodes.map((node) => (typeof node === "string" ? node : node.tag));
  // @ts-expect-error: no granularity
  pace.granularity = "line";
  const { state, next_index } = await reading.steer(" And then");
  next_index.toFixed(state.length);
  // @ts-expect-error: a text
  await reading.steer();
  stream("/v1/generate", branch("/v1/generate", reading, { index: 12, temperature: 1 }));
  stream("/v1/generate", regenerate("/v1/generate", { id: "", token: null }));
  for await (const event of follow(chatUrl("", "chat-1"), { tail: 1 })) {
    if (event.type === "turn") event.stream.toUpperCase();
    else event.readers.toFixed();
  }
  const [stopped] = await stopChat("/v1/chats/chat-1");
  stopped?.state.toUpperCase();
  // @ts-expect-error: an index
  branch("/v1/generate", reading, {});
  const { frame } = decode(new Uint8Array());
  if (frame.type === "StreamEnd") throw new TailraceError(frame.finish_reason);
  // @ts-expect-error: a text
  options.apiKey = 7;
  // @ts-expect-error: no field of a request
  stream("/v1/generate", { input: { model: "demo", temprature: 1 } });
  const messages = [{ role: "user", content: "" }];
  const stages = { punctuate: false };
  stream("/v1/generate", { input: { model: "demo", messages, unread: "run", stages } });
  const { text, error, end, quiet, cancel, steer } = useStream(reading, smooth);
  if (error instanceof TailraceError && error.retryable) error.message.length;
  const found: TailraceError | null = error;
  (await cancel())?.next_index.toFixed(Number(quiet));
  (await steer(found?.hint ?? ""))?.state.length;
  new TailraceChatTransport({ url: found?.hint ?? "" }).streamOf("chat-1")?.id?.length;
  return end ? text : "";
}
"""
CHAT = """
import type { ChatTransport, UIMessage } from "ai";
import { TailraceChatTransport } from "tailrace/ai-sdk";

type Titled = UIMessage<{ title: string }>;
export const plain: ChatTransport<UIMessage> = new TailraceChatTransport();
const own = new TailraceChatTransport({
  url: "https://edge.example.com",
  apiKey: "key",
  headers: async () => ({ "X-Own": "1" }),
  body: () => ({ model: "demo" }),
  stop: "leave",
  onStream: (reading, chatId) => reading.watch(() => `${chatId} ${reading.state}`),
  onStopError: ({ code, retryable }) => console.warn(code, retryable),
});
export const titled: ChatTransport<Titled> = own;
export async function cancel(chatId: string): Promise<string | undefined> {
  return (await own.streamOf(chatId)?.cancel())?.next_index.toFixed();
}
// @ts-expect-error: "cancel" or "leave"
new TailraceChatTransport({ stop: "pause" });
"""


READER = """
import { TailraceChatTransport } from "tailrace/ai-sdk";
import { stream } from "tailrace";
import { decode, encode } from "tailrace/wire";

const input = { model: "demo", prompt: "Once upon a time", max_tokens: 900, ignore_eos: true };
async function steered() {
  const reading = stream(URL_OF_IT, { input });
  for await (const _ of reading) {
    try {
      return [reading, await reading.steer(STEER)];
    } catch (error) {
      if (error.status !== 409) throw error;
      return steered(); // it had ended: this machine has other things to do
    }
  }
}
const [reading, status] = await steered();
reading.reconnect(); // to leave the loop was to detach
for await (const _ of reading) if (reading.content.includes(STEER)) break;
const { frame } = decode(encode({ type: "Token", text: "fox", index: 7 }));
const said = { status, id: reading.id, state: reading.state, text: reading.content, frame };
said.cancelled = await reading.cancel();
const url = new URL(URL_OF_IT, globalThis.location?.href).origin;
const transport = new TailraceChatTransport({ url });
const parts = [{ type: "text", text: "Once upon a time" }];
const messages = [{ id: "1", role: "user", parts }];
const request = { chatId: "chat-1", messages, trigger: "submit-message", body: { max_tokens: 5 } };
said.chunks = [];
const chunks = (await transport.sendMessages(request)).getReader();
for (let { value } = await chunks.read(); value; { value } = await chunks.read()) {
  said.chunks.push(value.type);
}
said.message = transport.streamOf("chat-1").id;
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as its only dependency."""
    installed(HERE)  # prepack finds it there, without a network
    folder = tmp_path_factory.mktemp("npm")
    made = folder / "project"
    shutil.rmtree(PACKAGE / "types", ignore_errors=True)  # from an earlier run; packing makes them
    said = run("npm", "pack", "--json", "--pack-destination", folder, PACKAGE)
    [packed] = json.loads(said[said.index("[\n") :])  # before it stands what `prepack` says
    named = {file["path"] for file in packed["files"]}
    manifest = json.loads((PACKAGE / "package.json").read_text())
    promised = {path[2:] for entry in manifest["exports"].values() for path in entry.values()}
    assert promised | {"package.json", "README.md", "types/schema.d.ts"} <= named
    assert all(path.endswith((".js", ".d.ts", "package.json", "README.md")) for path in named)
    made.mkdir()
    (made / "package.json").write_text(json.dumps({"name": "fresh", "type": "module"}))
    quiet = ("--offline", "--no-package-lock", "--no-audit", "--no-fund")
    run("npm", "install", "--prefix", made, *quiet, folder / packed["filename"])
    return made


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    origin = Origin(tmp_path_factory.mktemp("origin"))
    made = Edge(origin)
    async with running(origin, made):
        yield made


@pytest.mark.parametrize(
    "how", [("esnext", "bundler"), ("nodenext", "nodenext")], ids=["bundler", "nodenext"]
)
def test_who_writes_typescript_is_helped(project: Path, how: tuple[str, str]) -> None:
    types = project / "node_modules/@types"
    if not types.exists():
        # React's types, which a user of the hook has.
        types.symlink_to(HERE / "node_modules/@types")
    (project / "user.ts").write_text(USER)
    compile_strictly(project / "user.ts", how)


@pytest.mark.parametrize("package", ["ai", "ai-6"])
def test_the_transport_is_one_of_the_ai_sdk(project: Path, package: str) -> None:
    installed(SDKS)
    ai = project / "node_modules/ai"
    ai.unlink(missing_ok=True)
    ai.symlink_to(SDKS / "node_modules" / package)
    (project / "chat.ts").write_text(CHAT)
    # The types of `ai` themselves need those of Node.js.
    compile_strictly(project / "chat.ts", ("esnext", "bundler"), "--skipLibCheck")


def compile_strictly(file: Path, how: tuple[str, str], *more: str) -> None:
    strict = ("--strict", "--noEmit", "--target", "es2022", "--lib", "es2022,dom,dom.asynciterable")
    module = ("--module", how[0], "--moduleResolution", how[1], "--types", "")
    run(installed(HERE) / "tsc", "--ignoreConfig", *strict, *module, *more, file)


def check(said: dict[str, Any]) -> None:
    assert said["text"].count(STEER) == 1
    assert said["status"]["id"] == said["cancelled"]["id"] == said["id"]
    assert said["status"]["state"] in ("waiting", "running")
    assert said["state"] in ("detached", "ended") and said["cancelled"]["state"] == "ended"
    assert said["chunks"][:3] == ["start", "start-step", "text-start"]
    assert said["chunks"][-3:] == ["text-end", "finish-step", "finish"]
    assert re.fullmatch("[0-9a-f]{32}", said["message"])
    assert said["frame"] == {"type": "Token", "text": "fox", "index": 7}


def reader(url: str) -> str:
    return READER.replace("URL_OF_IT", json.dumps(url)).replace("STEER", json.dumps(STEER))


async def test_node_imports_it_reads_steers_and_cancels(project: Path, edge: Edge) -> None:
    told = "console.log(JSON.stringify(said));"
    (project / "reader.js").write_text(reader(f"{edge.url}/v1/generate") + told)
    check(json.loads(await done("node", project / "reader.js")))


async def test_a_page_needs_no_bundler(project: Path, edge: Edge) -> None:
    files = {"tailrace": "index.js", "tailrace/ai-sdk": "ai-sdk.js", "tailrace/wire": "wire.js"}
    names = {name: f"/node_modules/tailrace/{file}" for name, file in files.items()}
    script = reader("/v1/generate") + "window.said = said;"
    page_of_it = (
        f'<script type="importmap">{json.dumps({"imports": names})}</script>'
        f'<script type="module">{script}</script>'
    )

    async def file(route: Route) -> None:
        wanted = route.request.url.removeprefix(edge.url).lstrip("/")
        await route.fulfill(path=project / wanted, content_type="text/javascript")

    async def page_itself(route: Route) -> None:
        await route.fulfill(body=page_of_it, content_type="text/html")

    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = await launched.new_page()
        await page.route("**/node_modules/**", file)
        await page.route(f"{edge.url}/page", page_itself)
        await page.goto(f"{edge.url}/page")
        await page.wait_for_function("window.said", timeout=60_000)
        check(await page.evaluate("window.said"))
        await launched.close()
