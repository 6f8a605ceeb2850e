// Markdown as it streams, as a tree of a few safe elements. It builds no HTML, and no DOM.
//
// Raw HTML is shown as text. Links lead to http, https and mailto only. Images are links: loading one
// would tell another site what is read. marked (vendor/) divides the text into tokens.

import { lexer } from "./vendor/marked.js";

/** @typedef {import("./vendor/marked.js").Token} Token */
/** @typedef {{tag: string, attributes: Record<string, string>, children: MarkdownNode[]}} MarkdownElement */
/** @typedef {string | MarkdownElement} MarkdownNode */
/** A part of the text that is shown as a whole, with its place in the text. While the text grows,
 * blocks that have not changed stay the same objects.
 * @typedef {{begin: number, end: number, raw: string, nodes: MarkdownNode[]}} MarkdownBlock
 */

/** Maximum depth of lists, quotes and emphasis inside each other. Deeper ones are shown as their
 * source text.
 */
const MOST_DEPTH = 16;
const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
const LANGUAGE = /^[\w+#.-]{1,32}/;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp|ndash|mdash|hellip));/g;
/** Entities that models write. Others are shown as they are written. @type {Record<string, string>} */
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  ndash: "\u2013",
  mdash: "\u2014",
  hellip: "\u2026",
};
const LAST_CODE_POINT = 0x10ffff;
/** @type {Record<string, string>} */
const MARKS = { strong: "strong", em: "em", del: "del" };
const BLANK_LINE = /\n[ \t]*\n$/;

/** A growing text. Blocks that can change no more are not divided again, so the cost of an update
 * depends on the last blocks and not on the length of the text.
 */
export class MarkdownText {
  #text = "";
  /** Number of blocks that can change no more. */
  #settled = 0;
  #settledTo = 0;
  /** True if the text defines targets of links, which may stand before or behind their use. */
  #hasTargets = false;
  /** @type {MarkdownBlock[]} */
  #blocks = [];

  /** Return the blocks of the whole text so far, which may also have replaced a part of the text
   * before.
   * @param {string} source
   * @returns {readonly MarkdownBlock[]}
   */
  update(source) {
    const text = source.replace(/\r\n?/g, "\n");
    if (text === this.#text) return this.#blocks;
    if (!text.startsWith(this.#text)) this.#unsettle();
    this.#text = text;
    let tokens = tokensOf(text.slice(this.#settledTo));
    if (this.#settledTo > 0 && tokens.hasTargets) {
      this.#unsettle();
      tokens = tokensOf(text);
    }
    // A target that came or went changes the links of blocks that have not changed.
    const isSameElsewhere = !this.#hasTargets && !tokens.hasTargets;
    this.#hasTargets = tokens.hasTargets;
    this.#replaceRest(tokens.tokens, isSameElsewhere);
    return this.#blocks;
  }

  #unsettle() {
    this.#settled = this.#settledTo = 0;
  }

  /** Replace the blocks that may have changed. @param {Token[]} tokens @param {boolean} canKeep */
  #replaceRest(tokens, canKeep) {
    const before = this.#blocks.slice(this.#settled);
    const blocks = this.#blocks.slice(0, this.#settled);
    let begin = this.#settledTo;
    for (const token of tokens) {
      const { raw } = token;
      const end = begin + raw.length;
      const old = before[blocks.length - this.#settled];
      if (old && old.raw === raw && old.begin === begin && canKeep) blocks.push(old);
      else blocks.push({ begin, end, raw, nodes: blockOf(token, 0) });
      begin = end;
    }
    this.#blocks = blocks;
    const isWhole = begin === this.#text.length;
    if (isWhole && !this.#hasTargets) this.#settle();
  }

  /** Settle the blocks before the last two and a blank line. The line that arrives now can still
   * become a part of the block before it, such as a list.
   */
  #settle() {
    const blocks = this.#blocks;
    let open = 0;
    for (let nth = blocks.length - 1; nth > this.#settled; nth--) {
      const { raw, begin } = /** @type {MarkdownBlock} */ (blocks[nth]);
      if (!raw.trim()) continue;
      open += 1;
      if (open < 2 || !BLANK_LINE.test(this.#text.slice(0, begin))) continue;
      this.#settled = nth;
      this.#settledTo = begin;
      return;
    }
  }
}

/** Return the text that a reader of the blocks sees, for a screen reader. @param {readonly
 * MarkdownBlock[]} blocks
 */
export const plainText = (blocks) =>
  blocks.flatMap(({ nodes }) => nodes).map(textOf).filter((text) => text.trim()).join("\n");

/** @param {MarkdownNode} node @returns {string} */
function textOf(node) {
  if (typeof node === "string") return node;
  const text = node.children.map(textOf).join("");
  return node.tag === "br" || node.tag === "li" || node.tag === "tr" || node.tag === "p" ? `${text}\n` : text;
}

/** Return the address of a link, as a browser reads it, or null if a page should not lead there.
 * @param {string} href
 */
export function safeUrl(href) {
  let url;
  try {
    url = new URL(decoded(href));
  } catch {
    return null; // relative: it would lead to this page's own server
  }
  return SAFE_SCHEMES.includes(url.protocol) ? url.href : null;
}

/** @param {string} text @returns {{tokens: Token[], hasTargets: boolean}} */
function tokensOf(text) {
  try {
    const tokens = lexer(text);
    return { tokens, hasTargets: Object.keys(tokens.links).length > 0 };
  } catch {
    // Thousands of quotes inside each other exhaust the stack.
    return { tokens: [{ type: "unreadable", raw: text }], hasTargets: false };
  }
}

/** @param {string} tag @param {MarkdownNode[]} children @param {Record<string, string>} [attributes]
 * @returns {MarkdownElement}
 */
const element = (tag, children, attributes = {}) => ({ tag, attributes, children });

/** @param {Token[] | undefined} tokens @param {number} depth */
const blocksOf = (tokens, depth) => (tokens ?? []).flatMap((token) => blockOf(token, depth + 1));

/** @param {Token} token @param {number} depth @returns {MarkdownNode[]} */
function blockOf(token, depth) {
  const { type, raw, text = "", tokens } = token;
  if (depth > MOST_DEPTH) return [element("p", [raw])];
  switch (type) {
    case "space":
    case "def":
      return [];
    case "paragraph":
      return [element("p", inlinesOf(tokens, depth))];
    case "heading":
      return [element(`h${Math.min(6, token.depth ?? 1)}`, inlinesOf(tokens, depth))];
    case "code": {
      const language = token.lang?.match(LANGUAGE)?.[0];
      return [element("pre", [element("code", [text])], language ? { "data-language": language } : {})];
    }
    case "blockquote":
      return [element("blockquote", blocksOf(tokens, depth))];
    case "hr":
      return [element("hr", [])];
    case "list": {
      const items = (token.items ?? []).map((item) => element("li", blocksOf(item.tokens, depth)));
      const isShifted = token.ordered && typeof token.start === "number" && token.start !== 1;
      return [element(token.ordered ? "ol" : "ul", items, isShifted ? { start: String(token.start) } : {})];
    }
    case "table":
      return [tableOf(token, depth)];
    case "text":
    case "checkbox":
      return tokens ? inlinesOf(tokens, depth) : inlineOf(token, depth);
    default: // raw HTML, too
      return raw.trim() ? [element("p", [raw.trimEnd()])] : [];
  }
}

/** @param {Token} token @param {number} depth */
function tableOf({ header = [], rows = [], align = [] }, depth) {
  /** @param {"th" | "td"} tag @param {{tokens: Token[]}[]} cells */
  const row = (tag, cells) =>
    element(
      "tr",
      cells.map(({ tokens }, nth) => element(tag, inlinesOf(tokens, depth), align[nth] ? { class: `at-${align[nth]}` } : {})),
    );
  const body = rows.map((cells) => row("td", cells));
  return element("table", [element("thead", [row("th", header)]), ...(body.length ? [element("tbody", body)] : [])]);
}

/** @param {Token[] | undefined} tokens @param {number} depth */
const inlinesOf = (tokens, depth) => (tokens ?? []).flatMap((token) => inlineOf(token, depth + 1));

/** @param {Token} token @param {number} depth @returns {MarkdownNode[]} */
function inlineOf(token, depth) {
  const { type, raw, text = "", tokens } = token;
  const mark = MARKS[type];
  if (depth > MOST_DEPTH) return [raw];
  if (mark) return [element(mark, inlinesOf(tokens, depth))];
  switch (type) {
    case "text":
      return tokens ? inlinesOf(tokens, depth) : [decoded(text)];
    case "escape":
      return [text];
    case "codespan":
      return [element("code", [text])];
    case "br":
      return [element("br", [])];
    case "checkbox":
      return [token.checked ? "\u2611 " : "\u2610 "];
    case "link":
    case "image": {
      const shown = type === "link" ? inlinesOf(tokens, depth) : [decoded(text)];
      const href = safeUrl(token.href ?? "");
      if (href === null) return shown;
      return [element("a", shown.length && shown[0] ? shown : [href], { href, rel: "noopener noreferrer", target: "_blank" })];
    }
    default: // raw HTML, too
      return [raw];
  }
}

/** Return a text with its entities as characters. @param {string} text */
function decoded(text) {
  return text.replace(ENTITY, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= LAST_CODE_POINT ? String.fromCodePoint(code) : "\ufffd";
  });
}
