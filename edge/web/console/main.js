// The frame around the pages. The part of the URL behind # names the page that is shown.

import { ask, credentials, key, needsKey, usePolled } from "./api.js";
import { html, render, useEffect, useRef, useState } from "./ui.js";
import { Captions } from "./captions.js";
import { Health } from "./health.js";
import { Latency } from "./latency.js";
import { Ledger } from "./ledger.js";
import { Pool } from "./pool.js";
import { Streams } from "./streams.js";
import { Try } from "./try.js";

const PAGES = {
  try: { title: "Try it", view: Try, open: true },
  captions: { title: "Captions", view: Captions, open: true },
  streams: { title: "Streams", view: Streams },
  ledger: { title: "Ledger", view: Ledger },
  pool: { title: "Warm pool", view: Pool },
  latency: { title: "Latency", view: Latency },
  health: { title: "Health", view: Health },
};

function place() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return PAGES[name] ? { name, rest } : { name: "try", rest: [] };
}

function usePlace() {
  const [at, setAt] = useState(place);
  useEffect(() => {
    const moved = () => setAt(place());
    window.addEventListener("hashchange", moved);
    return () => window.removeEventListener("hashchange", moved);
  }, []);
  return at;
}

function Brand() {
  return html`<a class="brand" href="#/try" aria-label="Tailrace">
    <svg viewBox="0 0 32 32" fill="none" stroke="currentColor" stroke-width="2.6" stroke-linecap="round" aria-hidden="true">
      <path d="M3 9h9c5 0 6 7 11 7h6" /><path d="M3 16h6c5 0 6 7 11 7h9" /><path d="M3 23h3" />
    </svg>
    <span>Tailrace</span>
  </a>`;
}

function Links({ names, at }) {
  const list = useRef(null);
  // On a phone the row of page names is wider than the screen, so scroll to the current one.
  useEffect(() => {
    const here = list.current.querySelector("[aria-current]");
    const row = list.current.parentElement;
    if (here) row.scrollLeft = here.offsetLeft - row.offsetLeft - (row.clientWidth - here.clientWidth) / 2;
  }, [at]);
  return html`<ul ref=${list}>${names.map(
    (name) => html`<li><a href=${`#/${name}`} aria-current=${at === name ? "page" : null}>${PAGES[name].title}</a></li>`,
  )}</ul>`;
}

function Side({ at }) {
  const names = Object.keys(PAGES);
  const [stored, setStored] = useState(Boolean(key.get()));
  useEffect(() => {
    const changed = () => setStored(Boolean(key.get()));
    window.addEventListener("tailrace-key", changed);
    return () => window.removeEventListener("tailrace-key", changed);
  }, []);
  return html`<header class="side">
    <${Brand} />
    <nav aria-label="Pages">
      <p id="users">For developers</p>
      <${Links} names=${names.filter((name) => PAGES[name].open)} at=${at} />
      <p id="operators">For operators</p>
      <${Links} names=${names.filter((name) => !PAGES[name].open)} at=${at} />
    </nav>
    <div class="foot"><${Version} />${stored && html`<button class="plain" onClick=${() => key.set("")}>Forget the key</button>`}</div>
  </header>`;
}

/** The version of the edge, and of its wire format. */
function Version() {
  const [told, setTold] = useState(null);
  useEffect(() => void fetch("/version", { headers: credentials() }).then((answer) => answer.json()).then(setTold, () => {}), []);
  return told?.tailrace && html`<p>Tailrace ${told.tailrace}<br />schema <span class="mono">${told.schema.slice(0, 8)}</span></p>`;
}

/** Shown in place of a page that needs a key, or a key with more rights. */
function KeyForm({ error }) {
  const field = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    key.set(field.current.value.trim());
  };
  const why = key.get() || error.code === "missing_right" ? error.message : null;
  return html`<div class="page narrow">
    <header><h1>Operators only</h1>
      <p>This edge asks for an API key with the right <code>admin</code>. It stays in this tab, and is gone when you close it.</p></header>
    <form class="card keyform" onSubmit=${submit}>
      <label>API key<input ref=${field} type="password" autocomplete="off" spellcheck="false" required placeholder="tr_…" /></label>
      ${why && html`<p class="bad" role="alert">${why}</p>`}
      <div class="fields"><button class="first">Open the console</button></div>
      <p class="note">No key yet? On the edge’s machine: <code>tailrace key add ops --rights admin --keys FILE</code>,
        where FILE is the edge’s setting <code>edge.api_keys</code></p>
    </form>
  </div>`;
}

/** Show the pages if this tab has an operator’s key, otherwise a form that asks for the key. */
function Operators({ children }) {
  const { data, error } = usePolled((signal) => ask("ledger", { signal }), [], 30_000);
  if (error && needsKey(error)) return html`<${KeyForm} error=${error} />`;
  if (!data && !error) return html`<div class="page"></div>`;
  return children;
}

function App() {
  const { name, rest } = usePlace();
  const main = useRef(null);
  const first = useRef(true);
  useEffect(() => {
    document.title = `${PAGES[name].title} · Tailrace`;
    if (!first.current) main.current.focus({ preventScroll: true });
    first.current = false;
    window.scrollTo(0, 0);
  }, [name]);
  const { view: View, open } = PAGES[name];
  const page = html`<${View} key=${name} rest=${rest} />`;
  return html`<div class="shell">
    <${Side} at=${name} />
    <main tabindex="-1" ref=${main}>${open ? page : html`<${Operators}>${page}<//>`}</main>
  </div>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
