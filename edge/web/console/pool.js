// The warm pool: which model is loaded where and since when, its starts, and the cost of policies.

import { ask, usePolled } from "./api.js";
import { Bar } from "./health.js";
import { Simulator } from "./simulate.js";
import { Tiers } from "./tiers.js";
import { Empty, Fault, Page, Stat, State, clock, count, html, span, useRef, words } from "./ui.js";

/** Number of samples of the pool that this page keeps. They cover half an hour. */
const MOST_SAMPLES = 1800;
const KINDS = { ready: "on", loading: "wait", silent: "warn", down: "off" };

export function Pool() {
  const samples = useRef([]);
  const { data, error } = usePolled(async (signal) => {
    const told = await ask("pool", { signal });
    samples.current = [...samples.current, told].slice(-MOST_SAMPLES);
    return told;
  });
  const workers = (data?.origins || []).flatMap((one) => (one.workers || []).map((worker) => ({ ...worker, origin: one.origin })));
  const starts = (data?.origins || []).flatMap((one) => (one.starts || []).map((start) => ({ ...start, origin: one.origin })));
  const total = (of) => (data ? data.origins.reduce((sum, one) => sum + (of(one) || 0), 0) : null);
  return html`<${Page} title="Warm pool" about="The workers of every origin: the model that each holds, its load, and its cold starts.">
    ${error && html`<${Fault} error=${error} />`}
    ${data?.origins.filter((one) => one.error).map((one) => html`<${Fault} error=${{ message: `${one.origin}: ${one.error.message}` }} />`)}
    <dl class="card stats">
      <${Stat} name="Workers ready">${data ? html`${workers.filter((one) => one.state === "ready").length} <small>of ${workers.length}</small>` : "–"}<//>
      <${Stat} name="Streams">${data ? html`${count(total((one) => one.streams))} <small>of ${count(total((one) => one.room))}</small>` : "–"}<//>
      <${Stat} name="Deaths">${data ? count(workers.reduce((sum, one) => sum + one.deaths, 0)) : "–"}<//>
      <${Stat} name="Tokens generated">${data ? count(workers.reduce((sum, one) => sum + (one.load?.tokens || 0), 0)) : "–"}<//>
    </dl>
    <${Tiers} />
    <${Workers} workers=${workers} />
    <${Residency} samples=${samples.current} />
    <${Starts} starts=${starts} />
    <${Simulator} />
  <//>`;
}

function Workers({ workers }) {
  return html`<section class="card">
    <h2>Workers <small>load time: milliseconds where the model was in memory already</small></h2>
    ${workers.length === 0
      ? html`<${Empty} title="No worker yet">Workers are listed here as soon as an origin starts them.<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Workers"><table>
          <thead><tr><th>Worker</th><th>State</th><th>Model</th><th>Device</th><th class="number">Streams</th><th class="number">Tokens</th><th class="number">Last step</th><th class="number">KV cache</th><th class="number">Load time</th><th class="number">Deaths</th></tr></thead>
          <tbody>${workers.map((one) => html`<${Worker} key=${`${one.origin} ${one.worker}`} one=${one} />`)}</tbody>
        </table></div>`}
  </section>`;
}

function Worker({ one }) {
  const { load } = one;
  const used = load && load.pages ? 1 - load.pages_free / load.pages : null;
  const tokens = load && `${count(load.prompt_tokens)} of prompts, ${count(load.reused_tokens)} from the cache`;
  return html`<tr>
    <th scope="row" title=${one.origin}>${one.worker}</th>
    <td><${State} kind=${KINDS[one.state]}>${one.stage ? `${one.state}: ${words(one.stage)}` : one.state}<//>
      ${one.circuit !== "closed" && html`<div class="warn">circuit ${words(one.circuit)}: ${one.reason}</div>`}</td>
    <td>${one.model || "–"}</td>
    <td>${one.device || "–"}</td>
    <td class="number">${count(one.streams)}</td>
    <td class="number" title=${tokens}>${count(load?.tokens)}</td>
    <td class="number">${load ? span(load.step_us / 1000) : "–"}</td>
    <td class="number">${used == null ? "–" : html`${Math.round(used * 100)} % of ${count(load.pages)} pages<${Bar} share=${used} />`}</td>
    <td class="number">${span(one.load_ms ?? NaN)}</td>
    <td class="number">${count(one.deaths)}${one.exit_reason && html`<div><span class="bad">${words(one.exit_kind)}</span>, ${one.exit_reason}</div>`}</td>
  </tr>`;
}

/** Return the spans of time in which a worker had one state. */
function lanes(samples) {
  const all = new Map();
  for (const [nth, { origins }] of samples.entries()) {
    for (const { origin, workers = [] } of origins) {
      for (const one of workers) {
        const name = `${origin} · worker ${one.worker}`;
        if (!all.has(name)) all.set(name, []);
        const runs = all.get(name);
        const what = one.model ? `${one.state} ${one.model}` : one.state;
        const last = runs.at(-1);
        if (last && last.what === what && last.to === nth) last.to = nth + 1;
        else runs.push({ what, state: one.state, from: nth, to: nth + 1 });
      }
    }
  }
  return [...all];
}

function Residency({ samples }) {
  const size = Math.max(samples.length, 60);
  const first = samples[0]?.origins.find((one) => one.now_ms)?.now_ms;
  return html`<section class="card">
    <h2>Residency <small>${first ? `since ${clock(first)}, when this page was opened` : ""}</small></h2>
    ${lanes(samples).map(
      ([name, runs]) => html`<div class="lane" key=${name}>
        <span>${name}</span>
        <svg viewBox=${`0 0 ${size} 10`} preserveAspectRatio="none" role="img" aria-label=${`${name}: ${runs.map((run) => run.what).join(", then ")}`}>
          ${runs.map((run) => html`<rect class=${`run ${run.state}`} x=${run.from} y="0" width=${run.to - run.from} height="10"><title>${run.what}</title></rect>`)}
        </svg>
      </div>`,
    )}
    <ul class="key">${Object.keys(KINDS).map((state) => html`<li><i class=${`run ${state}`} aria-hidden="true"></i>${state}</li>`)}</ul>
  </section>`;
}

function Starts({ starts }) {
  const shown = starts.slice(-8).reverse();
  return html`<section class="card">
    <h2>Cold starts <small>the last ${shown.length}</small></h2>
    ${shown.length === 0
      ? html`<${Empty} title="No cold start yet">It is drawn here, stage by stage, as soon as a worker starts.<//>`
      : shown.map((start) => html`<${Start} key=${`${start.origin} ${start.worker} ${start.begin_ms}`} start=${start} />`)}
  </section>`;
}

function Start({ start }) {
  const end = start.ready_ms ?? Math.max(start.begin_ms, ...start.spans.map((one) => one.end_ms));
  const all = Math.max(1, end - start.begin_ms);
  const spans = start.spans.filter((one) => one.end_ms > one.begin_ms || start.spans.length === 1);
  const put = (one) => (at) => {
    if (!at) return;
    at.style.left = `${((one.begin_ms - start.begin_ms) / all) * 100}%`;
    at.style.width = `${Math.max(0.5, ((one.end_ms - one.begin_ms) / all) * 100)}%`;
  };
  const fate = start.exit_reason ? html`<${State} kind="off">${start.exit_reason}<//>` : start.ready_ms ? html`ready in ${span(all)}` : html`<${State} kind="wait">under way<//>`;
  return html`<article class="start">
    <h3>${clock(start.begin_ms)} · worker ${start.worker} <small>${fate}</small></h3>
    <ol>${spans.map(
      (one) => html`<li><span>${words(one.stage)}</span><span class="track"><i ref=${put(one)}></i></span><span class="right">${span(one.end_ms - one.begin_ms)}</span></li>`,
    )}</ol>
  </article>`;
}
