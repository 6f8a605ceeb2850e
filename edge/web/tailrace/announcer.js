// Announces a growing text to screen readers in whole sentences or paragraphs. Announced as it
// arrives, a text is interrupted with every token.

import { Pacer, common } from "./pacer.js";

/** Maximum number of announcements that stay in the region. */
const MOST_KEPT = 20;

/** Return a function that is called with the whole text so far, and announces what is new of it.
 *
 * `skip` takes a text without announcing it, such as one that was there when the page was opened.
 * A text that a revision has replaced is announced again from there.
 * @param {Element} region an empty element, which becomes a live region. It may be visually hidden.
 * @param {{granularity?: import("./pacer.js").Granularity, locale?: string}} [options] the
 *   granularity is "sentence" if none is given
 */
export function announcer(region, { granularity = "sentence", locale } = {}) {
  region.setAttribute("aria-live", "polite");
  region.setAttribute("role", "log");
  const pacer = new Pacer({ granularity, locale });
  let told = "";
  /** @param {string} text */
  const announce = (text) => {
    if (!text) return;
    const said = region.ownerDocument.createElement("p");
    said.textContent = text;
    region.append(said);
    while (region.childElementCount > MOST_KEPT) region.firstElementChild?.remove();
  };
  return {
    /** @param {string} text @param {boolean} [isEnded] */
    update(text, isEnded = false) {
      pacer.feed(text, 0);
      if (isEnded) pacer.end(0);
      const { visible } = pacer;
      if (told.startsWith(visible)) return;
      announce(visible.slice(common(told, visible)).trim());
      told = visible;
    },
    /** @param {string} text */
    skip(text) {
      pacer.feed(text, 0);
      told = text;
    },
  };
}
