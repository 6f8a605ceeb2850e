// Simulates policies of the warm pool over a trace: cold starts against idle GPU time, and the frontier.

import { ask } from "./api.js";
import { Plot, axis } from "./charts.js";
import { Empty, Fault, count, html, useMemo, useRef, useState } from "./ui.js";

const OWN = "history";
const GENERATED = ["mixed", "bursty", "diurnal", "rare"];
const POLICIES = ["ttl-60", "ttl-300", "ttl-3600", "break-even", "hybrid-histogram", "hybrid-histogram-1s", "adaptive-ttl", "predictive-prewarm"];
const UPLOAD = "upload";

export function Simulator() {
  const [source, setSource] = useState(OWN);
  const [chosen, setChosen] = useState(POLICIES.filter((name) => name !== "hybrid-histogram-1s"));
  const [told, setTold] = useState({ result: null, error: null, busy: false });
  const form = useRef(null);
  const run = async (event) => {
    event.preventDefault();
    const fields = new FormData(form.current);
    setTold((last) => ({ ...last, busy: true, error: null }));
    try {
      const request = {
        cold_cost_gpu_s: Number(fields.get("cold")),
        load_s: Number(fields.get("load")) || null,
        policies: chosen,
      };
      if (source === UPLOAD) request.csv = await /** @type {File} */ (fields.get("file")).text();
      else Object.assign(request, { trace: source, days: Number(fields.get("days")), seed: 1 });
      const result = await ask("simulate", { method: "POST", body: JSON.stringify(request) });
      setTold({ result, error: null, busy: false });
    } catch (error) {
      setTold((last) => ({ ...last, error, busy: false }));
    }
  };
  const toggle = (name) => () =>
    setChosen((last) => (last.includes(name) ? last.filter((one) => one !== name) : [...last, name]));
  return html`<section class="card">
    <h2>What would a policy cost? <small>offline, on the origin, in a process of its own</small></h2>
    <p class="note">Simulates the recorded requests of the first origin, a random trace, or a CSV file of your own with the columns <code>model,arrival_s,duration_s</code>.</p>
    <form ref=${form} class="simulator" onSubmit=${run}>
      <div class="fields">
        <label>Arrivals<select value=${source} onChange=${(event) => setSource(event.target.value)}>
          <option value=${OWN}>this origin’s own</option>${GENERATED.map((name) => html`<option value=${name}>${name}, random</option>`)}<option value=${UPLOAD}>a file of mine</option>
        </select></label>
        ${source === UPLOAD
          ? html`<label>File<input type="file" name="file" accept=".csv,text/csv" required /></label>`
          : html`<label>Days<input type="number" name="days" value="2" min="0.1" max="30" step="0.1" required /></label>`}
        <label>Price of a cold start, GPU-seconds<input type="number" name="cold" value="60" min="0.1" max="1000000" step="any" required /></label>
        <label>Load time, seconds<input type="number" name="load" placeholder=${source === OWN ? "as measured" : "10"} min="0.1" max="1000000" step="any" /></label>
      </div>
      <fieldset class="chosen"><legend>Policies</legend>
        ${POLICIES.map((name) => html`<label><input type="checkbox" checked=${chosen.includes(name)} onChange=${toggle(name)} /> ${name}</label>`)}
      </fieldset>
      <div class="fields"><button class="first" disabled=${told.busy || chosen.length === 0}>${told.busy ? "Simulating…" : "Simulate"}</button></div>
    </form>
    ${told.error && html`<${Fault} error=${told.error} />`}
    <div aria-live="polite">${told.result
      ? html`<${Result} result=${told.result} />`
      : html`<${Empty} title="Cold starts against idle time">Each policy becomes a point; the curve is every fixed time to live.<//>`}</div>
  </section>`;
}

function Result({ result }) {
  const data = useMemo(() => points(result), [result]);
  const best = result.policies.reduce((one, other) => (other.cost_gpu_s < one.cost_gpu_s ? other : one));
  const label = `Cold starts against wasted GPU-seconds of ${result.policies.length} policies; ${best.policy} costs least, ${best.over_optimum.toFixed(2)} times the optimum`;
  const tell = (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    const style = getComputedStyle(document.documentElement);
    // The curve falls, so there is room above it for the name of each point, with a line to the point.
    const right = plot.bbox.left + plot.bbox.width;
    named(result.policies, plot).forEach(([x, y, name], nth) => {
      const level = plot.bbox.top + (16 + 20 * nth) * devicePixelRatio;
      const isFar = x + ctx.measureText(name).width + 10 * devicePixelRatio > right;
      ctx.fillStyle = style.getPropertyValue("--line");
      ctx.fillRect(Math.round(x), level - 9 * devicePixelRatio, devicePixelRatio, Math.max(0, y - level));
      ctx.fillStyle = style.getPropertyValue("--ink");
      ctx.textAlign = isFar ? "right" : "left";
      ctx.fillText(name, x + (isFar ? -6 : 6) * devicePixelRatio, level);
    });
    ctx.restore();
  };
  return html`
    <p class="note">${count(result.requests)} requests to ${result.models.length} models, ${count(result.gaps)} idle gaps. Down and to the left is better.</p>
    <${Plot} data=${data} height=${340} label=${label} deps=${[result]} options=${(theme) => ({
      padding: [12, 44, 0, 0],
      scales: { x: { time: false, distr: 3 }, y: { distr: 3 } },
      axes: [
        axis(theme, { label: "wasted GPU-seconds", size: 30, labelSize: 22, grid: decades(theme) }),
        axis(theme, { label: "cold starts", size: 64, labelSize: 22, grid: decades(theme) }),
      ],
      hooks: { draw: [tell] },
      series: [
        {},
        { stroke: theme.soft, width: 1.5, spanGaps: true, points: { show: false } },
        { stroke: theme.accent, width: 0, paths: () => null, points: { show: true, size: 10, fill: theme.accent, stroke: theme.card, width: 2 } },
      ],
    })} />
    <div class="scroll" tabindex="0" role="region" aria-label="Policies compared"><table>
      <caption>The optimum knows every gap before it comes, and costs ${count(result.optimum_gpu_s)} GPU-seconds.</caption>
      <thead><tr><th>Policy</th><th class="number">Cold</th><th class="number">Wasted GPU-s</th><th class="number">Cost GPU-s</th><th class="number">Over the optimum</th></tr></thead>
      <tbody>${[...result.policies].sort((a, b) => a.cost_gpu_s - b.cost_gpu_s).map(
        (one) => html`<tr><th scope="row">${one.policy}</th><td class="number">${(one.cold_rate * 100).toFixed(2)} %</td><td class="number">${count(one.wasted_gpu_s)}</td><td class="number">${count(one.cost_gpu_s)}</td><td class="number">${one.over_optimum.toFixed(3)} ×</td></tr>`,
      )}</tbody>
    </table></div>`;
}

/** Return grid lines at powers of ten only. */
const decades = (theme) => ({
  stroke: theme.line,
  width: 1,
  filter: (_, at) => at.map((value) => (Math.abs(Math.log10(value) % 1) < 1e-9 ? value : null)),
});

/** Return the positions of the points. Points that overlap share one name. */
function named(policies, plot) {
  const places = [];
  for (const one of policies) {
    const x = plot.valToPos(one.wasted_gpu_s, "x", true);
    const y = plot.valToPos(one.cold_starts, "y", true);
    const near = places.find((other) => Math.hypot(other[0] - x, other[1] - y) < 14 * devicePixelRatio);
    if (near) near[2] += `, ${one.policy}`;
    else places.push([x, y, one.policy]);
  }
  return places.sort((one, other) => one[0] - other[0]);
}

/** Return both series over one x axis, as uPlot needs them, without values that have no logarithm. */
function points({ ttls, policies }) {
  const all = [
    ...ttls.map((one) => [one.wasted_gpu_s, one.cold_starts, null]),
    ...policies.map((one) => [one.wasted_gpu_s, null, one.cold_starts]),
  ].filter(([x, curve, point]) => x > 0 && (curve ?? point) > 0);
  all.sort((one, other) => one[0] - other[0]);
  return [0, 1, 2].map((column) => all.map((row) => row[column]));
}
