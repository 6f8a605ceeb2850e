// Markdown in the console, while it streams, and the colours of its code.

import { MarkdownText } from "../tailrace/markdown.js";
import { HighlightedCode, grammarOf } from "./highlight.js";
import { h, html, useEffect, useRef, useState } from "./ui.js";

/** The elements of blocks, and of pieces of code, that are shown. While one of these stays the same
 * object, so does its element, and preact leaves it alone.
 * @type {WeakMap<object, any>}
 */
const drawn = new WeakMap();

/** @template {object} T @param {T} part @param {(part: T) => any} draw */
function drawnOnce(part, draw) {
  if (!drawn.has(part)) drawn.set(part, draw(part));
  return drawn.get(part);
}

/** Show a growing text. A mark stands before each block in which the network was cut, at one of the
 * lengths `cuts` of the text.
 */
export function Markdown({ text, cuts = [] }) {
  const markdown = useRef(null);
  markdown.current ??= new MarkdownText();
  const blocks = markdown.current.update(text);
  return blocks.map((block) => {
    const isCut = cuts.some((place) => place > block.begin && place <= block.end && place < text.length);
    const elements = drawnOnce(block, ({ nodes }) => nodes.map(elementOf));
    return html`${isCut && html`<i class="cutmark" aria-hidden="true"></i>`}${elements}`;
  });
}

/** @param {import("../tailrace/markdown.js").MarkdownNode} node */
function elementOf(node) {
  if (typeof node === "string") return node;
  const language = node.attributes["data-language"];
  if (language) return h(Code, { language, text: textOf(node) });
  return h(node.tag, node.attributes, ...node.children.map(elementOf));
}

/** @param {import("../tailrace/markdown.js").MarkdownNode} node @returns {string} */
const textOf = (node) => (typeof node === "string" ? node : node.children.map(textOf).join(""));

/** Show a growing block of code. It has no colours until the rules of its language are loaded. */
function Code({ language, text }) {
  const [code, setCode] = useState(/** @type {HighlightedCode | null} */ (null));
  useEffect(() => {
    let isCurrent = true;
    const loaded = (grammar) => isCurrent && setCode(grammar && new HighlightedCode(grammar));
    grammarOf(language).then(loaded, () => loaded(null)); // without a network there are no colours
    return () => void (isCurrent = false);
  }, [language]);
  const shown = code ? code.update(text).map((piece) => drawnOnce(piece, pieceOf)) : text;
  return html`<pre data-language=${language}><code>${shown}</code></pre>`;
}

/** @param {readonly import("./highlight.js").Token[]} piece */
const pieceOf = (piece) =>
  html`<span>${piece.map(({ text, type }) => (type ? html`<span class=${`code-${type}`}>${text}</span>` : text))}</span>`;
