// The streams that run or wait: a window of a list that may have ten thousand rows, updated each second.

import { ask, usePolled } from "./api.js";
import { Empty, Fault, Page, Stat, State, clock, count, html, short, span, useEffect, useMemo, useRef, useState, words } from "./ui.js";

const ROW_PX = 40;
/** Rows that are requested above and below the visible ones. */
const SPARE = 20;
const MOST_ROWS = 240;
/** Minimum height of the list in rows, so that it does not jump with every stream. */
const LEAST_ROWS = 5;

const COLUMNS = [
  { field: "id", title: "Stream" },
  { field: "state", title: "State" },
  { field: "model", title: "Model", wide: true },
  { field: "tenant", title: "Tenant", wide: true },
  { field: "began_ms", title: "Age", number: true, upside: true },
  { field: "last_ms", title: "Last frame", number: true, wide: true, upside: true },
  { field: "tokens", title: "Tokens", number: true },
  { field: "readers", title: "Readers", number: true, wide: true },
  { field: "resumes", title: "Resumes", number: true, wide: true },
  { field: "takeovers", title: "Takeovers", number: true, wide: true },
];
const KINDS = { running: "on", starting: "wait", waiting: "wait", cancelling: "warn" };

export function Streams() {
  const [sort, setSort] = useState({ field: "began_ms", order: "desc" });
  const [filter, setFilter] = useState({ state: "", tenant: "", id: "", origin: "" });
  const [range, setRange] = useState({ first: 0, size: 40 });
  const query = { sort: sort.field, order: sort.order, offset: range.first, limit: range.size, ...filter };
  const known = useRef({ query: "", cursor: "", rows: new Map() });
  const asked = JSON.stringify(query);

  const { data, error, again } = usePolled(
    async (signal) => {
      const last = known.current;
      const since = last.query === asked ? last.cursor : "";
      const page = await ask("streams", { query: { ...query, since }, signal });
      const rows = new Map();
      // For rows that have not changed the answer has only the id, so take the rest from the last
      // answer.
      for (const row of page.streams) rows.set(row.id, { ...last.rows.get(row.id), ...row });
      known.current = { query: asked, cursor: page.cursor, rows };
      const ended = since ? [...page.ended, ...(last.ended || [])].slice(0, 100) : page.ended;
      known.current.ended = ended;
      return { ...page, rows: [...rows.values()], first: range.first, ended };
    },
    [asked],
  );

  const limits = data && data.origins.length > 1 && !filter.origin;
  const found = data ? (limits ? Math.min(data.found, 1000) : data.found) : 0;
  return html`<${Page} title="Streams" about="All streams that run or wait at the origins of this edge, updated every second.">
    ${error && html`<${Fault} error=${error} />`}
    <dl class="card stats">
      <${Stat} name="Live">${count(data?.live)}<//>
      <${Stat} name="Running">${count(data?.states.running ?? (data ? 0 : null))}<//>
      <${Stat} name="Waiting">${count(data ? (data.states.waiting ?? 0) + (data.states.starting ?? 0) : null)}<//>
      <${Stat} name="Paused">${count(data?.paused)}<//>
    </dl>
    <section class="card flush" aria-label="Live streams">
      <${Filters} filter=${filter} set=${setFilter} origins=${data?.origins || []} />
      <${Rows} data=${data} found=${found} sort=${sort} setSort=${setSort} range=${range} setRange=${setRange} again=${again} />
      ${limits && data.found > 1000 && html`<p class="note inset">The first 1,000 of ${count(data.found)}: choose an origin to see all of its streams.</p>`}
    </section>
    <${Ended} ended=${data?.ended} />
  <//>`;
}

function Filters({ filter, set, origins }) {
  const change = (name) => (event) => set((last) => ({ ...last, [name]: event.target.value.trim() }));
  return html`<form class="fields inset" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label>Stream ID<input value=${filter.id} onInput=${change("id")} placeholder="first hex digits" maxlength="32" size="14" /></label>
    <label>State<select value=${filter.state} onChange=${change("state")}>
      <option value="">any</option>${Object.keys(KINDS).map((state) => html`<option>${state}</option>`)}
    </select></label>
    <label>Tenant<input value=${filter.tenant} onInput=${change("tenant")} placeholder="any" size="10" /></label>
    ${origins.length > 1 &&
    html`<label>Origin<select value=${filter.origin} onChange=${change("origin")}>
      <option value="">all</option>${origins.map(({ origin }) => html`<option>${origin}</option>`)}
    </select></label>`}
  </form>`;
}

function Rows({ data, found, sort, setSort, range, setRange, again }) {
  const box = useRef(null);
  const look = () => {
    if (!box.current) return; // the page was left
    const { scrollTop, clientHeight } = box.current;
    const top = Math.floor(scrollTop / ROW_PX / SPARE) * SPARE;
    const seen = Math.ceil(clientHeight / ROW_PX);
    const first = Math.max(0, top - SPARE);
    const size = Math.min(MOST_ROWS, seen + 3 * SPARE);
    if (first !== range.first || size !== range.size) setRange({ first, size });
  };
  useEffect(look, []);
  // The height follows the number of rows, within the limits of the style sheet.
  const high = (at) => {
    box.current = at;
    if (at) at.style.height = `${Math.max(LEAST_ROWS, found) * ROW_PX}px`;
  };
  const order = (field) => () => {
    const falls = sort.field === field && sort.order === "desc";
    setSort({ field, order: falls ? "asc" : "desc" });
    box.current.scrollTop = 0;
  };
  const head = COLUMNS.map(
    ({ field, title, number, wide, upside }) => html`<div
      role="columnheader"
      class=${classes(number, wide)}
      aria-sort=${sort.field !== field ? "none" : (sort.order === "asc") !== Boolean(upside) ? "ascending" : "descending"}
    ><button class="plain" onClick=${order(field)}>${title}</button></div>`,
  );
  return html`<div role="table" aria-label="Live streams" aria-rowcount=${found + 1} class="list">
    <div role="rowgroup"><div role="row" aria-rowindex="1" class="row head">${head}<div role="columnheader"><span class="hidden">Actions</span></div></div></div>
    <div role="rowgroup" class="body" ref=${high} onScroll=${look} tabindex="0" aria-label="Rows, to be scrolled">
      ${data && found === 0
        ? html`<div role="row"><div role="cell"><${Empty} title="No streams">No matching stream is running. <a href="#/try">Try it</a>: it will be listed here in a second.<//></div></div>`
        : html`<div class="rail" role="presentation" ref=${(at) => at && (at.style.height = `${found * ROW_PX}px`)}>
            ${data?.rows.map((row, nth) => html`<${Row} key=${row.id} row=${row} place=${data.first + nth} now=${data.now_ms} again=${again} />`)}
          </div>`}
    </div>
  </div>`;
}

const classes = (number, wide) => [number && "number", wide && "wide"].filter(Boolean).join(" ");

function Row({ row, place, now, again }) {
  const [asked, setAsked] = useState(false);
  const cancel = async () => {
    setAsked(true);
    try {
      await ask(`streams/${row.id}/cancel`, { method: "POST" });
    } catch {
      setAsked(false); // the stream still runs, and can be cancelled again
    }
    again();
  };
  const put = (at) => at && (at.style.transform = `translateY(${place * ROW_PX}px)`);
  const cell = (content, number, wide) => html`<div role="cell" class=${classes(number, wide)}>${content}</div>`;
  return html`<div role="row" class="row" aria-rowindex=${place + 2} ref=${put}>
    ${cell(html`<a class="mono" href=${`#/ledger/${row.id}`} title=${row.id}>${row.id.slice(0, 8)}<span class="wide">…${row.id.slice(-4)}</span></a>`)}
    ${cell(html`<${State} kind=${KINDS[row.state] || ""}>${row.state}<//>`)}
    ${cell(row.model, false, true)} ${cell(row.tenant || "–", false, true)}
    ${cell(span(now - row.began_ms), true)} ${cell(row.last_ms ? span(now - row.last_ms) : "–", true, true)}
    ${cell(count(row.tokens), true)} ${cell(count(row.readers), true, true)}
    ${cell(count(row.resumes), true, true)} ${cell(count(row.takeovers), true, true)}
    ${cell(html`<button class="plain danger" disabled=${asked || row.state === "cancelling"} onClick=${cancel} aria-label=${`Cancel stream ${short(row.id)}`}>Cancel</button>`, true)}
  </div>`;
}

export function Ended({ ended, most = 12 }) {
  const shown = useMemo(() => (ended || []).slice(0, most), [ended, most]);
  return html`<section class="card">
    <h2>Streams that ended recently <small>the origins remember the last 512 each</small></h2>
    ${shown.length === 0
      ? html`<${Empty} title="Nothing has ended yet">Ended streams are listed here, with the reason of their end.<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Streams that ended recently"><table>
          <thead><tr><th>Stream</th><th>Ended</th><th>Reason</th><th>Model</th><th class="number">Tokens</th><th class="number">Took</th><th class="number">Resumes</th></tr></thead>
          <tbody>${shown.map(
            (one) => html`<tr key=${one.id}>
              <th scope="row"><a class="mono" href=${`#/ledger/${one.id}`}>${short(one.id)}</a></th>
              <td>${clock(one.ended_ms)}</td><td>${words(one.finish_reason)}</td><td>${one.model}</td>
              <td class="number">${count(one.tokens)}</td>
              <td class="number">${span(one.ended_ms - one.began_ms)}</td>
              <td class="number">${count(one.resumes)}</td>
            </tr>`,
          )}</tbody>
        </table></div>`}
  </section>`;
}
