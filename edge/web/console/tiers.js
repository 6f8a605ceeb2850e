// The models of all origins over time: their tiers, their requests, and the reasons for the tiers; and
// commands to the pools of origins with several models.

import { ask, usePolled } from "./api.js";
import { Empty, Fault, State, clock, count, html, span, useRef, useState } from "./ui.js";

/** Interval between requests for the counts, which cover a day and change slowly. */
const EVERY_MS = 5000;
const WARM = ["hot", "compiled"];

const TTL = "ttl";
const POLICIES = ["adaptive-ttl", "predictive-prewarm", "break-even", "hybrid-histogram", "hybrid-histogram-1s", "greedy-dual"];

/** Send a command to the pools of all origins, or of one. Throws the refusal of an origin. */
async function order(what, body, origin) {
  const told = await ask(`warm/${what}`, { method: "POST", query: { origin }, body: JSON.stringify(body) });
  const refused = told.origins.find(({ error }) => error);
  if (refused) throw Object.assign(new Error(`${refused.origin}: ${refused.error.message}`), { hint: refused.error.hint });
}

/** Return `[give, { busy, error, said }]`, where `give(work, said)` carries out a command, and the
 * other fields are its progress, its error, or the text `said` once it has succeeded.
 */
function useOrders(again) {
  const [told, setTold] = useState({ busy: false, error: null, said: "" });
  const give = async (work, said) => {
    setTold({ busy: true, error: null, said: "" });
    try {
      await work();
      setTold({ busy: false, error: null, said });
    } catch (error) {
      setTold({ busy: false, error, said: "" });
    }
    again();
  };
  return /** @type {const} */ ([give, told]);
}

export function Tiers() {
  const { data, again } = usePolled((signal) => ask("warm", { signal }), [], EVERY_MS);
  const origins = (data?.origins || []).filter((one) => one.models);
  const rows = origins.flatMap((one) => one.models.map((model) => ({ ...model, origin: one.origin })));
  const pools = origins.filter((one) => one.pool);
  const isPooled = (model) => pools.some(({ origin }) => origin === model.origin);
  const [give, told] = useOrders(again);
  const load = ({ model, origin }) => give(() => order("prewarm", { model }, origin), `${model} is loaded if there is room`);
  const pin = ({ model, origin, pinned }) =>
    give(() => order("pin", { model, pinned: !pinned }, origin), `${model} is ${pinned ? "no longer pinned" : "pinned, also after a restart"}`);
  return html`<section class="card">
    <h2>Models <small>over the last day${origins.map((one) => one.problem && html`; ${one.origin} keeps no history: ${one.problem}`)}</small></h2>
    ${rows.length === 0
      ? html`<${Empty} title="No requests yet">The requests to each model, and its cold starts, are counted here.<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Models and their tiers"><table>
          <thead><tr><th>Model</th><th>Tier</th><th class="number">Requests (1 h)</th><th class="number">(24 h)</th><th class="number">Cold starts</th><th class="number">Load time</th><th>Policy</th><th>Keep until</th>${pools.length > 0 && html`<th><span class="hidden">Orders</span></th>`}</tr></thead>
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
              ${pools.length > 0 && html`<td class="orders">${isPooled(one) && one.residence && html`
                <button class="plain" disabled=${told.busy || WARM.includes(one.tier)} onClick=${() => load(one)} aria-label=${`Load ${one.model} now`}>Load</button>
                <button class="plain" disabled=${told.busy} onClick=${() => pin(one)} aria-label=${`${one.pinned ? "Unpin" : "Pin"} ${one.model}`}>${one.pinned ? "Unpin" : "Pin"}</button>`}</td>`}
            </tr>`,
          )}</tbody>
        </table></div>`}
    ${pools.map((one) => one.shadow && html`<p class="note">Shadow policy ${one.shadow.policy}${pools.length > 1 && ` of ${one.origin}`}: ${count(one.shadow.cold_starts)} cold starts in ${span(one.shadow.for_s * 1000)}, where the real policy had ${count(one.shadow.real_cold_starts)}.</p>`)}
    ${pools.length > 0 && html`<${Policy} pools=${pools} give=${give} busy=${told.busy} />`}
    <p class="note" role="status">${told.said}</p>
    ${told.error && html`<${Fault} error=${told.error} />`}
  </section>`;
}

/** Let pools use another policy, or run it as their shadow policy. */
function Policy({ pools, give, busy }) {
  const [policy, setPolicy] = useState(POLICIES[0]);
  const [seconds, setSeconds] = useState("300");
  const form = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(form.current);
    const name = policy === TTL ? `ttl-${seconds}` : policy;
    const shadow = fields.has("shadow");
    const origin = pools.length === 1 ? pools[0].origin : String(fields.get("origin"));
    const work = async () => {
      for (const one of pools) if (!origin || one.origin === origin) await order("apply", { policy: name, shadow }, one.origin);
    };
    give(work, shadow ? `${name} is the shadow policy` : `${name} decides until the next restart`);
  };
  return html`<form ref=${form} class="fields policy" onSubmit=${submit}>
    <label>Policy<select value=${policy} onChange=${({ target }) => setPolicy(target.value)}>
      ${POLICIES.map((name) => html`<option>${name}</option>`)}<option value=${TTL}>a fixed time to live</option>
    </select></label>
    ${policy === TTL && html`<label>Seconds<input type="number" value=${seconds} onInput=${({ target }) => setSeconds(target.value)} min="0" max="315360000" required /></label>`}
    ${pools.length > 1 && html`<label>Origin<select name="origin"><option value="">all</option>${pools.map(({ origin }) => html`<option>${origin}</option>`)}</select></label>`}
    <label class="check"><input type="checkbox" name="shadow" /> as the shadow policy only</label>
    <button disabled=${busy}>Apply</button>
  </form>`;
}
