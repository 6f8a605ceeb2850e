// Shows Markdown in an element of a page while it streams. Elements are created one by one, never from
// HTML, so a page's Content-Security-Policy needs no exception.

import { MarkdownText } from "./markdown.js";

export { MarkdownText, plainText } from "./markdown.js";

/** @typedef {import("./markdown.js").MarkdownNode} MarkdownNode */

/** Return a function that shows the whole text so far in an element. Blocks that have not changed keep
 * their elements, and with them the reader's selection.
 * @param {Element} parent an empty element
 * @returns {(text: string) => void}
 */
export function markdownInto(parent) {
  const markdown = new MarkdownText();
  /** @type {{block: import("./markdown.js").MarkdownBlock, nodes: Node[]}[]} */
  let shown = [];
  return (text) => {
    const blocks = markdown.update(text);
    let same = 0;
    while (same < shown.length && shown[same]?.block === blocks[same]) same++;
    for (const { nodes } of shown.slice(same)) for (const node of nodes) node.parentNode?.removeChild(node);
    const added = blocks.slice(same).map((block) => ({ block, nodes: block.nodes.map((node) => made(node, parent.ownerDocument)) }));
    parent.append(...added.flatMap(({ nodes }) => nodes));
    shown = [...shown.slice(0, same), ...added];
  };
}

/** @param {MarkdownNode} node @param {Document} document @returns {Node} */
function made(node, document) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attributes)) element.setAttribute(name, value);
  element.append(...node.children.map((child) => made(child, document)));
  return element;
}
