// The models of all origins over time: their tiers, their requests, and the reasons for the tiers.

import { ask, usePolled } from "./api.js";
import { Empty, State, clock, count, html, span } from "./ui.js";

/** Interval between requests for the counts, which cover a day and change slowly. */
const EVERY_MS = 5000;
const WARM = ["hot", "compiled"];

export function Tiers() {
  const { data } = usePolled((signal) => ask("warm", { signal }), [], EVERY_MS);
  const origins = (data?.origins || []).filter((one) => one.models);
  const rows = origins.flatMap((one) => one.models.map((model) => ({ ...model, origin: one.origin })));
  return html`<section class="card">
    <h2>Models <small>over the last day${origins.map((one) => one.problem && html`; ${one.origin} keeps no history: ${one.problem}`)}</small></h2>
    ${rows.length === 0
      ? html`<${Empty} title="No requests yet">The requests to each model, and its cold starts, are counted here.<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Models and their tiers"><table>
          <thead><tr><th>Model</th><th>Tier</th><th class="number">Requests (1 h)</th><th class="number">(24 h)</th><th class="number">Cold starts</th><th class="number">Load time</th><th>Policy</th><th>Keep until</th></tr></thead>
          <tbody>${rows.map(
            (one) => html`<tr key=${`${one.origin} ${one.model}`}>
              <th scope="row" title=${one.origin}>${one.model}</th>
              <td>${one.tier ? html`<${State} kind=${WARM.includes(one.tier) ? "on" : "off"}>${one.tier}<//>` : "–"}</td>
              <td class="number">${count(one.arrivals_hour)}</td>
              <td class="number">${count(one.arrivals)}</td>
              <td class="number">${count(one.cold)}</td>
              <td class="number">${one.load_s === null ? "–" : span(one.load_s * 1000)}</td>
              <td>${one.pinned ? "pinned" : one.policy || "–"}</td>
              <td>${one.keep_until_ms ? clock(one.keep_until_ms) : "–"}</td>
            </tr>`,
          )}</tbody>
        </table></div>`}
  </section>`;
}
