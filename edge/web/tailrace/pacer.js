// Decides how much of a growing text its reader sees at a time: by tokens, words, sentences or
// paragraphs, at a number of words a minute, or nothing more while it is paused.
//
// It does no I/O: it gets the text and the time. What it shows is always a prefix of the text that has
// arrived, and all of it in the end. When a unit is shown does not depend on how often it is asked.

/** @typedef {"token" | "word" | "sentence" | "paragraph"} Granularity */

/**
 * @typedef {object} PacerOptions
 * @property {number} [wordsPerMinute] Infinity, the default, shows each unit as soon as it is complete
 * @property {Granularity} [granularity] what is shown as a whole; the default is "token"
 * @property {string} [locale] BCP 47 tag of the text's language, for the limits of words and sentences
 */

/** @type {readonly Granularity[]} */
export const GRANULARITIES = ["token", "word", "sentence", "paragraph"];
/** Maximum length of a unit, in UTF-16 code units. A longer one, such as a line of base64, is shown in
 * pieces.
 */
export const MOST_UNIT_CHARS = 2_000;
/** Length of the text before a unit that is searched for a word that continues in the unit. */
const CONTEXT_CHARS = 32;
const MS_PER_MINUTE = 60_000;
const BLANK_LINE = /\n[ \t]*\n+/g;

export class Pacer {
  #text = "";
  #shown = 0;
  /** Complete units that are not shown yet, in order. @type {{end: number, words: number}[]} */
  #units = [];
  /** The end of the last complete unit: behind it the text has not been divided. */
  #dividedTo = 0;
  /** Ends of the texts that were fed, behind what is shown. @type {number[]} */
  #fed = [];
  /** The time from which the next word may be shown. */
  #readyAt = -Infinity;
  /** @type {number | null} */
  #pausedAt = null;
  #isEnded = false;
  #isReleased = false;
  /** @type {Granularity} */
  #granularity;
  #msPerWord;
  #locale;
  /** @type {Map<string, Intl.Segmenter>} */
  #segmenters = new Map();

  /** @param {PacerOptions} [options] */
  constructor({ wordsPerMinute = Infinity, granularity = "token", locale } = {}) {
    this.#msPerWord = msPerWord(wordsPerMinute);
    this.#granularity = checked(granularity);
    this.#locale = locale;
  }

  /** Take the whole text so far, which may also have replaced a part of the text before. Throws an
   * Error after `end`.
   * @param {string} text
   * @param {number} now in milliseconds of any monotonic clock, as everywhere here
   */
  feed(text, now) {
    if (this.#isEnded) throw new Error("a Pacer takes no text after its end");
    this.advance(now);
    if (!text.startsWith(this.#text)) this.#takeBack(common(this.#text, text));
    this.#text = text;
    if (text.length > (this.#fed.at(-1) ?? this.#shown)) this.#fed.push(text.length);
    this.#divide();
    this.advance(now);
  }

  /** Note that the text is complete. @param {number} now */
  end(now) {
    this.advance(now);
    this.#isEnded = true;
    this.#divide();
    this.advance(now);
  }

  /** Show nothing more until `resume`. @param {number} now */
  pause(now) {
    this.advance(now);
    if (!this.#isReleased) this.#pausedAt ??= now;
  }

  /** @param {number} now */
  resume(now) {
    if (this.#pausedAt === null) return;
    this.#readyAt = now + Math.max(0, this.#readyAt - this.#pausedAt);
    this.#pausedAt = null;
    this.advance(now);
  }

  /** Show at once what has arrived, such as the text that was shown before a reload. @param {number}
   * now
   */
  catchUp(now) {
    const last = this.#units.at(-1);
    if (last) this.#shown = last.end;
    this.#units = [];
    this.#readyAt = this.#pausedAt ?? now;
    this.#forgetShown();
  }

  /** Show at once what has arrived and what will arrive, whatever the settings say. @param {number}
   * now
   */
  release(now) {
    this.#isReleased = true;
    this.#pausedAt = null;
    this.#divideAnew();
    this.catchUp(now);
  }

  /** Change the speed. What is left of the wait for the next unit changes in the same proportion.
   * @param {number} wordsPerMinute @param {number} now
   */
  setSpeed(wordsPerMinute, now) {
    const before = this.#msPerWord;
    const after = msPerWord(wordsPerMinute);
    this.advance(now);
    const since = this.#pausedAt ?? now;
    const left = Math.max(0, this.#readyAt - since);
    this.#readyAt = since + (before ? (left * after) / before : 0);
    this.#msPerWord = after;
    this.#divideAnew();
    this.advance(now);
  }

  /** Change what is shown as a whole. @param {Granularity} granularity @param {number} now */
  setGranularity(granularity, now) {
    this.advance(now);
    this.#granularity = checked(granularity);
    this.#divideAnew();
    this.advance(now);
  }

  /** Show the units whose time has come. @param {number} now */
  advance(now) {
    if (this.#pausedAt !== null) return;
    let count = 0;
    for (const { end, words } of this.#units) {
      if (words > 0 && this.#readyAt > now) break; // the rest of a word does not wait
      this.#shown = end;
      if (!this.#isReleased) this.#readyAt += words * this.#msPerWord;
      count += 1;
    }
    if (count) {
      this.#units = this.#units.slice(count);
      this.#forgetShown();
    }
    // Time in which there was nothing to show is not made up for.
    if (!this.#units.length) this.#readyAt = Math.max(this.#readyAt, now);
  }

  /** The part of the text that is shown. */
  get visible() {
    return this.#text.slice(0, this.#shown);
  }

  /** The time at which more is shown, or null if none is known. @returns {number | null} */
  get due() {
    return this.#pausedAt === null && this.#units.length ? this.#readyAt : null;
  }

  /** The length of the text that has arrived and is not shown, in UTF-16 code units. */
  get behind() {
    return this.#text.length - this.#shown;
  }

  get isPaused() {
    return this.#pausedAt !== null;
  }

  /** True if the text is complete and all of it is shown. */
  get isDone() {
    return this.#isEnded && this.behind === 0;
  }

  // ---- units ----

  /** Forget what does not belong to the text any more. @param {number} kept length of the common
   * beginning of the texts
   */
  #takeBack(kept) {
    this.#shown = Math.min(this.#shown, kept);
    this.#units = this.#units.filter(({ end }) => end <= kept);
    this.#fed = this.#fed.filter((end) => end <= kept);
    this.#dividedTo = this.#units.at(-1)?.end ?? this.#shown;
  }

  #forgetShown() {
    const nth = this.#fed.findIndex((end) => end > this.#shown);
    this.#fed = nth < 0 ? [] : this.#fed.slice(nth);
  }

  #divideAnew() {
    this.#units = [];
    this.#dividedTo = this.#shown;
    this.#divide();
  }

  /** Find the complete units in the text that has not been divided. */
  #divide() {
    const ends = [...this.#ends()];
    if (this.#isEnded) ends.push(this.#text.length);
    for (const end of ends) {
      this.#cutLong(end);
      this.#push(end);
    }
    this.#cutLong(this.#text.length);
  }

  /** Make units of the text before `end` until the rest of it is short enough. @param {number} end */
  #cutLong(end) {
    while (end - this.#dividedTo > MOST_UNIT_CHARS) {
      const place = this.#dividedTo + MOST_UNIT_CHARS;
      this.#push(place - Number(isInPair(this.#text, place)));
    }
  }

  /** @param {number} end */
  #push(end) {
    if (end <= this.#dividedTo) return;
    const words = this.#msPerWord ? this.#words(this.#dividedTo, end) : 0;
    this.#units.push({ end, words });
    this.#dividedTo = end;
  }

  /** Return the ends of the complete units behind `#dividedTo`. @returns {Iterable<number>} */
  *#ends() {
    const from = this.#dividedTo;
    const rest = this.#text.slice(from);
    if (this.#isReleased || this.#granularity === "token") {
      yield* this.#fed.filter((end) => end > from);
    } else if (this.#granularity === "paragraph") {
      for (const { 0: found, index } of rest.matchAll(BLANK_LINE)) yield from + index + found.length;
    } else {
      // The last segment may go on in the text that is still to come.
      for (const { index } of this.#segments(this.#granularity, rest)) if (index) yield from + index;
    }
  }

  /** Return the number of words that begin in a part of the text. @param {number} from @param {number}
   * to
   */
  #words(from, to) {
    const start = Math.max(0, from - CONTEXT_CHARS);
    let words = 0;
    for (const { index, isWordLike } of this.#segments("word", this.#text.slice(start, to))) {
      words += Number(isWordLike && start + index >= from);
    }
    return words;
  }

  /** @param {"word" | "sentence"} granularity @param {string} text */
  #segments(granularity, text) {
    let segmenter = this.#segmenters.get(granularity);
    if (!segmenter) {
      segmenter = new Intl.Segmenter(this.#locale, { granularity });
      this.#segmenters.set(granularity, segmenter);
    }
    return segmenter.segment(text);
  }
}

/** @param {number} wordsPerMinute */
function msPerWord(wordsPerMinute) {
  if (!(wordsPerMinute > 0)) {
    throw new RangeError(`wordsPerMinute is ${wordsPerMinute}; it has to be a positive number, or Infinity`);
  }
  return MS_PER_MINUTE / wordsPerMinute;
}

/** @param {Granularity} granularity */
function checked(granularity) {
  if (GRANULARITIES.includes(granularity)) return granularity;
  throw new RangeError(`granularity is ${granularity}; it has to be one of ${GRANULARITIES.join(", ")}`);
}

/** Return the length of the common beginning of two texts, without half of a surrogate pair.
 * @param {string} a
 * @param {string} b
 */
export function common(a, b) {
  let end = 0;
  while (end < a.length && a[end] === b[end]) end++;
  return end - Number(isInPair(a, end));
}

/** Return true if a cut at `place` would divide a surrogate pair. @param {string} text @param {number}
 * place
 */
const isInPair = (text, place) => /^[\ud800-\udbff][\udc00-\udfff]$/.test(text.slice(Math.max(0, place - 1), place + 1));
