// Syntax colours of a growing block of code, as pieces of tokens. It builds no HTML, and no DOM.
//
// Speed Highlight (vendor/highlight/) finds the tokens. The cost of an update does not depend on the length
// of the block: a piece of whole lines that is long enough is settled, and never read again.

import { tokenizeWith } from "./vendor/highlight/tokenize.js";

/** A part of the code, with the type of token that it is if it has one, such as "kwd".
 * @typedef {{text: string, type?: string}} Token
 */
/** The rules of a language, and those of languages that it embeds.
 * @typedef {{rules: any, languages: Record<string, any>}} Grammar
 */

/** Maximum text that is divided at a time, in UTF-16 code units. Some expressions of the languages take
 * a time that grows with its square. A longer comment or string is divided as if it began anew.
 */
export const MOST_OPEN_CHARS = 2_000;
/** Maximum text that has colours, in UTF-16 code units, because each token is an element of the page. */
export const MOST_CHARS = 200_000;

/** The file in vendor/highlight/ of each name of a language. @type {Map<string, string>} */
const FILES = new Map();
for (const [file, ...names] of [
  ["bash", "sh", "shell", "zsh", "console"],
  ["c", "h", "cpp", "c++", "cc", "hpp"],
  ["css"],
  ["diff", "patch"],
  ["go", "golang"],
  ["html", "htm"],
  ["java"],
  ["js", "javascript", "jsx", "mjs", "cjs"],
  ["json", "jsonc", "json5"],
  ["py", "python", "python3"],
  ["rs", "rust"],
  ["sql", "postgresql", "sqlite"],
  ["toml"],
  ["ts", "typescript", "tsx"],
  ["xml", "svg"],
  ["yaml", "yml"],
]) {
  for (const name of [file, ...names]) FILES.set(name, file);
}
/** Languages that are embedded in others. @type {Record<string, string[]>} */
const EMBEDDED = { html: ["css", "js"], ts: ["js"] };

/** @param {string} file */
const load = async (file) => (await import(`./vendor/highlight/${file}.js`)).default;

/** Load the rules of a language. Return null if it has none here.
 * @param {string} language as it is written behind the fence of the code
 * @returns {Promise<Grammar | null>}
 */
export async function grammarOf(language) {
  const file = FILES.get(language.toLowerCase());
  if (!file) return null;
  const names = [file, ...(EMBEDDED[file] ?? [])];
  const rules = await Promise.all(names.map(load));
  return { rules: rules[0], languages: Object.fromEntries(names.map((name, nth) => [name, rules[nth]])) };
}

/** A block of code that grows. */
export class HighlightedCode {
  #grammar;
  /** Pieces that can change no more. @type {Token[][]} */
  #settled = [];
  #settledText = "";

  /** @param {Grammar} grammar */
  constructor(grammar) {
    this.#grammar = grammar;
  }

  /** Return the pieces of the whole code so far, which may also have replaced the code before. Pieces
   * that have not changed stay the same objects.
   * @param {string} text
   * @returns {readonly (readonly Token[])[]}
   */
  update(text) {
    if (!text.startsWith(this.#settledText)) [this.#settled, this.#settledText] = [[], ""];
    let place = this.#settledText.length;
    while (text.length - place > MOST_OPEN_CHARS && place < MOST_CHARS) {
      place += this.#settle(text.slice(place, place + MOST_OPEN_CHARS));
    }
    this.#settledText = text.slice(0, place);
    const open = text.slice(place);
    return [...this.#settled, place < MOST_CHARS ? this.#divide(open) : [{ text: open }]];
  }

  /** Settle the lines of an open text that no token continues, and return their length. @param {string}
   * open
   */
  #settle(open) {
    const end = endOfLines(this.#divide(open)) || open.lastIndexOf("\n") + 1 || lengthOfCharacters(open);
    this.#settled.push(this.#divide(open.slice(0, end)));
    return end;
  }

  /** @param {string} text @returns {Token[]} */
  #divide(text) {
    /** @type {Token[]} */
    const tokens = [];
    const { rules, languages } = this.#grammar;
    tokenizeWith(text, rules, (part, type) => part && tokens.push(type ? { text: part, type } : { text: part }), { languages });
    return tokens;
  }
}

/** Return the end of the last whole line behind which no token goes on, or 0. @param {Token[]} tokens */
function endOfLines(tokens) {
  let place = 0;
  let end = 0;
  for (const { text, type } of tokens) {
    const last = text.lastIndexOf("\n") + 1;
    if (last === text.length || (last && !type)) end = place + last;
    place += text.length;
  }
  return end;
}

/** Return the length of a text without half of a surrogate pair at its end. @param {string} text */
const lengthOfCharacters = (text) => text.length - Number(/[\ud800-\udbff]$/.test(text));
