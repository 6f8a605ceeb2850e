// Tokens over time as one line, which is flat while the network is cut and then catches up.

import { html } from "./ui.js";

const WIDTH = 360;
const HEIGHT = 120;

export function River({ wire }) {
  const points = wire?.points ?? [];
  const [lastAt, lastIndex] = points.at(-1) ?? [0, 0];
  const until = Math.max(wire?.took ?? 0, lastAt, ...(wire?.cuts.map((cut) => cut.back ?? cut.at) ?? []), 1000);
  const most = Math.max(lastIndex, ...(wire?.cuts.map((cut) => cut.madeUntil ?? 0) ?? []), 20);
  const x = (at) => Number(((at / until) * WIDTH).toFixed(1));
  const y = (index) => (HEIGHT - 6 - (index / most) * (HEIGHT - 14)).toFixed(1);
  const line = (list) => list.map(([at, index]) => `${x(at)},${y(index)}`).join(" ");
  const runs = [];
  for (const point of points) {
    const last = runs.at(-1);
    if (last && last.replayed === point[2]) last.points.push(point);
    else runs.push({ replayed: point[2], points: joined(last, point) });
  }
  const label = wire
    ? `${lastIndex + 1} frames in ${(lastAt / 1000).toFixed(1)} seconds, ${wire.cuts.length} cuts`
    : "Nothing has been sent yet";
  return html`<svg class="river" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>
    ${wire?.cuts.map((cut) => html`<rect class="gap" x=${x(cut.at)} y="0" height=${HEIGHT} width=${Math.max(1, x(cut.back ?? until) - x(cut.at))} />`)}
    ${wire?.cuts.map((cut) => cut.madeUntil != null && html`<polyline class="unseen" points=${line([[cut.at, cut.had], [cut.back, cut.madeUntil]])} />`)}
    ${runs.map((run) => html`<polyline class=${run.replayed ? "replayed" : "live"} points=${line(run.points)} />`)}
  </svg>
  <ul class="key"><li><i class="live"></i>live</li><li><i class="gap"></i>cut</li><li><i class="replayed"></i>replayed from the ledger</li></ul>`;
}

/** Return the first points of a line that follows `last`. The live line continues where it was;
 * replayed tokens begin at the time when they arrive, not at the cut.
 */
function joined(last, point) {
  if (!last) return [point];
  const [, index] = last.points.at(-1);
  return point[2] ? [[point[0], index], point] : [last.points.at(-1), point];
}
