// A jitter buffer of words: shows text at an even pace although its frames arrive unevenly.

/** @typedef {import("./core.js").StreamFrame} StreamFrame */
/** @typedef {import("./stream.js").Stream} Stream */

/**
 * @typedef {object} Pace
 * @property {boolean} [off] shows text as it comes, as screen readers need it, which cannot be
 *   detected. The default is true if the reader prefers reduced motion.
 * @property {number} [lagMs] the maximum delay of the shown text
 * @property {() => number} [now]
 * @property {(ring: () => void, ms: number) => unknown} [setTimer]
 */

const LAG_MS = 300;
const TICK_MS = 33;
const WORD = /\s*\S+/g;

/** Return the length to show next: `shown` characters and about `words` more words.
 * @param {string} text
 * @param {number} shown
 * @param {number} words
 */
function cutAfter(text, shown, words) {
  WORD.lastIndex = shown;
  let end = shown;
  for (let nth = 0; nth < words; nth++) {
    const found = WORD.exec(text);
    if (!found) return text.length;
    end = found.index + found[0].length;
  }
  return end;
}

/** Return the length of the common beginning of two texts. @param {string} a @param {string} b */
function common(a, b) {
  let end = 0;
  while (end < a.length && a[end] === b[end]) end++;
  return end;
}

const prefersLess = () =>
  globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches ?? false;

/** Give the text of a stream so far, again and again, each time some words longer. It gets shorter only
 * when a revision takes text back. Text that was shown before a reload comes at once.
 * @param {Pick<Stream, "seen" | "content"> & AsyncIterable<StreamFrame>} reading
 * @param {Pace} [pace]
 * @returns {AsyncGenerator<string, void>}
 */
export async function* smooth(reading, { off = prefersLess(), lagMs = LAG_MS, now, setTimer } = {}) {
  const clock = now ?? (() => performance.now());
  const later = setTimer ?? setTimeout;
  const iterator = reading[Symbol.asyncIterator]();
  let isOver = false;
  let atOnce = reading.content.length; // the length that is shown without a pause
  /** @type {unknown} */
  let fault = null;
  let wake = () => {};
  const read = async () => {
    try {
      for (let { value, done } = await iterator.next(); !done; { value, done } = await iterator.next()) {
        if (value.index < reading.seen) atOnce = reading.content.length;
        wake();
      }
    } catch (error) {
      fault = error;
    }
    isOver = true;
    wake();
  };
  let shown = "";
  let last = clock();
  read();
  try {
    for (;;) {
      const before = reading.content;
      if (!before.startsWith(shown)) shown = before.slice(0, common(shown, before));
      if (shown === before) {
        if (isOver) break;
        await new Promise((resolve) => (wake = () => resolve(null)));
        last = clock();
        continue;
      }
      if (!off && shown.length >= atOnce) {
        await new Promise((ring) => later(() => ring(null), TICK_MS));
      }
      const text = reading.content;
      if (!text.startsWith(shown)) continue;
      // All waiting text is shown within `lagMs`, even if a hidden page slows its timers.
      const left = text.slice(shown.length).match(WORD)?.length ?? 1;
      const words = Math.ceil((left * Math.max(1, clock() - last)) / lagMs);
      last = clock();
      shown = off ? text : text.slice(0, Math.max(atOnce, cutAfter(text, shown.length, words)));
      yield shown;
    }
    if (fault) throw fault;
  } finally {
    if (!isOver) await iterator.return?.();
  }
}
