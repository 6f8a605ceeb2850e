// Markdown in the console, while it streams.

import { MarkdownText } from "../tailrace/markdown.js";
import { h, html, useRef } from "./ui.js";

/** The elements of blocks that are shown. While a block stays the same object, so does its element,
 * and preact leaves it alone.
 * @type {WeakMap<import("../tailrace/markdown.js").MarkdownBlock, any>}
 */
const drawn = new WeakMap();

/** Show a growing text. A mark stands before each block in which the network was cut, at one of the
 * lengths `cuts` of the text.
 */
export function Markdown({ text, cuts = [] }) {
  const markdown = useRef(null);
  markdown.current ??= new MarkdownText();
  const blocks = markdown.current.update(text);
  return blocks.map((block) => {
    if (!drawn.has(block)) drawn.set(block, block.nodes.map(elementOf));
    const isCut = cuts.some((place) => place > block.begin && place <= block.end && place < text.length);
    return html`${isCut && html`<i class="cutmark" aria-hidden="true"></i>`}${drawn.get(block)}`;
  });
}

/** @param {import("../tailrace/markdown.js").MarkdownNode} node */
const elementOf = (node) =>
  typeof node === "string" ? node : h(node.tag, node.attributes, ...node.children.map(elementOf));
