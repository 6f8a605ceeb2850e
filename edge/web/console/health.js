// The state of this edge and of its origins: what the edge observes, and what the origins report.

import { ask, usePolled } from "./api.js";
import { Fault, Page, Stat, State, bytes, count, html, span } from "./ui.js";

export function Health() {
  const { data, error } = usePolled((signal) => ask("health", { signal }));
  const ledgers = usePolled((signal) => ask("ledger", { signal }), [], 2000);
  return html`<${Page} title="Health" about="This edge, and the origins that it is linked to.">
    ${error && html`<${Fault} error=${error} />`}
    ${data && html`<${Edge} edge=${data.edge} />`}
    <div class="columns">${data?.origins.map(
      (one) => html`<${Origin} key=${one.origin} one=${one} ledger=${ledgers.data?.origins.find(({ origin }) => origin === one.origin)} />`,
    )}</div>
  <//>`;
}

function Edge({ edge }) {
  return html`<section class="card">
    <h2>Edge <small><${State} kind=${edge.ready ? "on" : "off"}>${edge.draining ? "draining" : edge.ready ? "ready" : "not ready"}<//></small></h2>
    <dl class="stats">
      <${Stat} name="Up for">${span(edge.uptime_s * 1000)}<//>
      <${Stat} name="Requests under way">${count(edge.requests)}<//>
      <${Stat} name="HTTP/3">${edge.http3 ? "yes" : "no"}<//>
      <${Stat} name="Version">${edge.version}<//>
      <${Stat} name="PID">${edge.pid}<//>
    </dl>
    ${edge.reasons.map((reason) => html`<p class="warn">${reason}</p>`)}
  </section>`;
}

function Origin({ one, ledger }) {
  const itself = one.itself.error ? null : one.itself;
  const state = !one.up ? ["off", "no link"] : one.breaker ? ["warn", `left alone: breaker ${one.breaker}`] : one.ready ? ["on", "ready"] : ["warn", "not ready"];
  return html`<section class="card">
    <h2><span class="mono">${one.origin}</span> <small><${State} kind=${state[0]}>${state[1]}<//></small></h2>
    ${one.itself.error && html`<p class="warn">${one.itself.error.message}</p>`}
    ${one.reasons?.map((reason) => html`<p class="warn">${reason}</p>`)}
    <dl class="pairs">
      <dt>Models</dt><dd>${one.models?.join(", ") || "–"}</dd>
      <dt>Streams</dt><dd>${one.up ? html`${count(one.streams)} of ${count(one.room)}<${Bar} share=${one.streams / one.room} />` : "–"}</dd>
      <dt>Version</dt><dd>${itself?.version || "–"}</dd>
      <dt>Ledger</dt><dd>${ledger?.used_bytes == null ? "–" : html`${bytes(ledger.used_bytes)}${ledger.wal_bytes != null && html`, and ${bytes(ledger.wal_bytes)} of WAL`}${ledger.disk_free_bytes != null && html`; ${bytes(ledger.disk_free_bytes)} free on its disk`}`}</dd>
      ${itself && itself.ledger_silent_s > 0.5 && html`<dt>Database responding</dt><dd class="warn">no, for ${span(itself.ledger_silent_s * 1000)}</dd>`}
    </dl>
    ${itself &&
    html`<h3>Linked edges</h3>
      <ul class="edges">${itself.edges.map(
        (edge) => html`<li><span class="mono">${edge.address || "unix"}</span> <span class="soft">${edge.software}, ${count(edge.streams)} ${edge.streams === 1 ? "stream" : "streams"} open</span></li>`,
      )}</ul>`}
  </section>`;
}

export function Bar({ share }) {
  const width = (at) => at && (at.style.width = `${Math.min(100, Math.max(0, share * 100))}%`);
  return html`<span class="bar" aria-hidden="true"><span ref=${width}></span></span>`;
}
