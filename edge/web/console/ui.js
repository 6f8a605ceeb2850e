// Helpers of all pages: markup by tagged templates, and the format of figures.

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { Fragment, h, render } from "./vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";

/** @type {(strings: TemplateStringsArray, ...values: unknown[]) => any} */
export const html = htm.bind(h);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (n) => (n == null ? "–" : whole.format(n));

export function bytes(n) {
  if (n == null) return "–";
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${unit && n < 10 ? n.toFixed(1) : whole.format(n)} ${UNITS[unit]}`;
}

/** Return a duration in words: 0.05 ms, 4.2 ms, 310 ms, 1.5 s, 12 s, 3 min, 5 h, 2 d. */
export function span(ms) {
  if (ms == null || !Number.isFinite(ms)) return "–";
  if (ms < 999.5) return `${ms < 1 ? Number(ms.toPrecision(2)) : ms < 10 ? Number(ms.toFixed(1)) : whole.format(ms)} ms`;
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${whole.format(s)} s`;
  if (s < 7200) return `${whole.format(s / 60)} min`;
  return s < 172_800 ? `${whole.format(s / 3600)} h` : `${whole.format(s / 86_400)} d`;
}

export const clock = (ms) => (ms == null ? "–" : new Date(ms).toLocaleTimeString("en-GB"));
export const date = (ms) => (ms == null ? "–" : new Date(ms).toLocaleString("en-GB"));
export const short = (id) => `${id.slice(0, 8)}…${id.slice(-4)}`;
export const words = (text) => text.replaceAll("_", " ").replaceAll("-", " ");

export function Empty({ title, children }) {
  return html`<div class="empty"><strong>${title}</strong><p>${children}</p></div>`;
}

export function Fault({ error }) {
  return html`<div class="fault" role="alert">
    <strong>${error.message}</strong>${error.hint && html` <span class="soft">${error.hint}</span>`}
  </div>`;
}

export function Stat({ name, unit, children }) {
  return html`<div><dt>${name}</dt><dd>${children}${unit && html` <small>${unit}</small>`}</dd></div>`;
}

/** A word with a mark, so that its meaning does not depend on colour alone. */
export function State({ kind, children }) {
  return html`<span class=${`state ${kind}`}>${children}</span>`;
}

export function Page({ title, about, children }) {
  return html`<div class="page">
    <header><h1>${title}</h1>${about && html`<p>${about}</p>`}</header>
    ${children}
  </div>`;
}
