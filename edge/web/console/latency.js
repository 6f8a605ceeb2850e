// Latencies of tokens, from the histograms of the origins’ metrics.

import { ask, usePolled } from "./api.js";
import { Plot, axis, quantile } from "./charts.js";
import { Empty, Fault, Page, Stat, count, html, span, useMemo, useRef, useState } from "./ui.js";

const TITLES = {
  tailrace_time_to_first_token_seconds: ["Time to first token", "from admission to the first release"],
  tailrace_inter_token_latency_seconds: ["Between tokens", "from one release to the next"],
  tailrace_ledger_append_seconds: ["Commits of the ledger", "until a step’s frames are durable"],
  tailrace_ledger_append_bytes: ["Size of a commit", "bytes of the frames of one step"],
};
/** Possible distances between the marks of an axis of counts. */
const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((zeros) => n * 10 ** zeros)).sort((a, b) => a - b);
const SHARES = [0.5, 0.95, 0.99];
/** Width of a bar's label, in pixels. */
const MARK_PX = 76;

/** Return the bars that get a label: as many as fit, and always the last bar. */
function marked(count, width) {
  const step = Math.max(1, Math.ceil((count * MARK_PX) / width));
  return Array.from({ length: Math.ceil(count / step) }, (_, nth) => count - 1 - nth * step).reverse();
}

/** Return the histogram with this name, summed over all origins and series. */
function summed(origins) {
  const all = new Map();
  for (const { histograms = [] } of origins) {
    for (const { name, help, bounds, series } of histograms) {
      if (!all.has(name)) all.set(name, { name, help, bounds, counts: new Array(bounds.length + 1).fill(0) });
      const { counts } = all.get(name);
      for (const one of series) one.counts.forEach((n, at) => (counts[at] += n));
    }
  }
  return [...all.values()];
}

export function Latency() {
  const { data, error } = usePolled((signal) => ask("histograms", { signal }), [], 2000);
  const [recent, setRecent] = useState(false);
  const base = useRef(null);
  const all = useMemo(() => data && summed(data.origins), [data]);
  if (all && !base.current) base.current = new Map(all.map((one) => [one.name, one.counts]));
  const shown = all?.map((one) => {
    const before = base.current.get(one.name);
    const began = one.counts.some((n, at) => before && n < before[at]); // an origin was restarted, so its counts begin at 0
    if (!recent || !before || began) return one;
    return { ...one, counts: one.counts.map((n, at) => n - before[at]) };
  });
  return html`<${Page} title="Latency" about="Measured by the origins, all priorities together.">
    ${error && html`<${Fault} error=${error} />`}
    <fieldset class="choice"><legend class="hidden">Tokens to measure</legend>
      <label><input type="radio" name="since" checked=${!recent} onChange=${() => setRecent(false)} /> since the origins began</label>
      <label><input type="radio" name="since" checked=${recent} onChange=${() => setRecent(true)} /> since this page was opened</label>
    </fieldset>
    <div class="columns">${shown?.map((one) => html`<${Histogram} key=${one.name} one=${one} />`)}</div>
  <//>`;
}

function Histogram({ one }) {
  const [title, about] = TITLES[one.name] || [one.name.replace(/^tailrace_/, "").replaceAll("_", " "), one.help];
  const total = one.counts.reduce((sum, n) => sum + n, 0);
  const isTime = one.name.endsWith("_seconds");
  const write = (value) => (value == null ? "–" : isTime ? span(value * 1000) : count(value));
  const ends = [...one.bounds.map(write), `> ${write(one.bounds.at(-1))}`];
  const data = useMemo(() => [one.counts.map((_, at) => at), one.counts], [one.counts]);
  const told = SHARES.map((share) => [share, quantile(one.bounds, one.counts, share)]);
  const label = `${title}: ${told.map(([share, value]) => `${share * 100} % within ${write(value)}`).join(", ")}, of ${count(total)}`;
  return html`<section class="card">
    <h2>${title} <small>${about}</small></h2>
    <dl class="stats four">
      ${told.map(([share, value]) => html`<${Stat} name=${`p${share * 100}`}>${write(value)}<//>`)}
      <${Stat} name="Counted">${count(total)}<//>
    </dl>
    ${total === 0
      ? html`<div class="plot"><${Empty} title="Nothing to measure yet">Measurements appear as streams run.<//></div>`
      : html`<${Plot} data=${data} label=${label} deps=${[one.name]} options=${(theme) => ({
          padding: [8, MARK_PX / 2, 0, 0],
          scales: { x: { time: false, range: [-0.6, one.counts.length - 0.4] } },
          axes: [
            axis(theme, { splits: (plot) => marked(one.counts.length, plot.width), values: (_, at) => at.map((n) => ends[n]), grid: { show: false }, size: 34 }),
            axis(theme, { size: 54, incrs: WHOLE }),
          ],
          series: [{}, { fill: theme.accent, stroke: theme.accent, width: 0, paths: window.uPlot.paths.bars({ size: [0.82] }), points: { show: false } }],
        })} />`}
  </section>`;
}
