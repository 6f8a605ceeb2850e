// The colours of code without a page: every character once, in pieces that stay, at a bounded cost.

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { HighlightedCode, MOST_CHARS, MOST_OPEN_CHARS, grammarOf } from "../../edge/web/console/highlight.js";

const FOLDER = new URL("../../edge/web/console/vendor/highlight/", import.meta.url);
const FILES = readdirSync(FOLDER).filter((name) => name !== "tokenize.js").map((name) => name.replace(".js", ""));
const PYTHON = `def greet(name):  # polite
    """Say
    hello."""
    return f"Hello, {name}" if name is not None else 42
`;

const textOf = (pieces) => pieces.flat().map(({ text }) => text).join("");
const typed = (pieces) => pieces.flat().filter(({ type }) => type).map(({ text, type }) => [type, text]);

test("each name of a language has its rules, and other names have none", async () => {
  for (const file of FILES) assert.ok((await grammarOf(file)).rules, file);
  assert.deepEqual(await grammarOf("JavaScript"), await grammarOf("js"));
  for (const name of ["", "brainfuck", "constructor", "__proto__", "../tokenize", "tokenize"]) {
    assert.equal(await grammarOf(name), null, name);
  }
});

test("tokens have their types", async () => {
  const code = new HighlightedCode(await grammarOf("python"));
  const found = typed(code.update(PYTHON));
  for (const one of [["kwd", "def"], ["func", "greet"], ["cmnt", "# polite"], ["bool", "None"], ["num", "42"]]) {
    assert.ok(found.some((token) => token.join() === one.join()), `${one} in ${JSON.stringify(found)}`);
  }
  assert.ok(found.some(([type, text]) => type === "cmnt" && text.includes("Say\n    hello.")));
});

test("whatever is written, in any steps, is shown once and in order", async () => {
  const parts = [PYTHON, "/* a\n", "*/", "`${", "}`", "<script>", "</script>", "'", '"', "\\", "\n\n", "\u{1f40b}", "<!--", "#", "key: 1\n"];
  let seed = 7;
  const random = (most) => (seed = (seed * 48_271) % 2_147_483_647) % most;
  for (const file of FILES) {
    const code = new HighlightedCode(await grammarOf(file));
    let text = "";
    for (let step = 0; step < 150; step++) {
      text += parts[random(parts.length)];
      if (random(40) === 0) text = text.slice(0, random(text.length)); // as a revision takes text back
      assert.equal(textOf(code.update(text)), text, file);
    }
  }
});

test("pieces that are complete stay the same, and no comment is divided", async () => {
  const code = new HighlightedCode(await grammarOf("js"));
  const comment = "/* one\n two\n three */\n";
  let text = "";
  let before = [];
  while (text.length < 5 * MOST_OPEN_CHARS) {
    for (const line of `const a = 1;\n${comment}`.split(/(?<=\n)/)) {
      text += line;
      const pieces = code.update(text);
      assert.ok(before.slice(0, -1).every((piece, nth) => piece === pieces[nth]));
      before = pieces;
    }
  }
  assert.ok(before.length >= 5);
  const comments = typed(before).filter(([type]) => type === "cmnt");
  assert.equal(comments.length, text.split(comment).length - 1);
  // A fence that closes takes back the beginning of its line.
  const pieces = code.update(text + "``");
  assert.ok(code.update(text).slice(0, -1).every((piece, nth) => piece === pieces[nth]));
});

test("a block of thousands of lines costs as much for each update as a short one", () => {
  let read = 0;
  const counting = { lastIndex: 0, exec: (text) => void (read += text.length - counting.lastIndex) };
  const code = new HighlightedCode({ rules: [{ match: counting, type: "kwd" }], languages: {} });
  let text = "";
  for (let line = 0; line < 2_000; line++) {
    text += `    the line ${line} of a long program\n`;
    read = 0;
    code.update(text);
    assert.ok(read <= 3 * MOST_OPEN_CHARS, `${read} characters were read for line ${line}`);
  }
});

test("the end of a very long block has no colours", async () => {
  const code = new HighlightedCode(await grammarOf("js"));
  const text = "return 1;\n".repeat((MOST_CHARS + 30_000) / 10);
  const pieces = code.update(text);
  assert.equal(textOf(pieces), text);
  assert.ok(pieces.flat().every(({ text: one }) => one.length < 10 || !/^r/.test(one)) || pieces.at(-1).length === 1);
  assert.ok(pieces.at(-1)[0].text.length > 20_000 && !pieces.at(-1)[0].type);
});
