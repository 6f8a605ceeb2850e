// uPlot in the page’s colours. A chart is drawn again when the colours or its size change.

import { html, useEffect, useRef } from "./ui.js";

const HEIGHT_PX = 240;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: of("ink"), soft: of("soft"), line: of("line"), accent: of("accent"), accentSoft: of("accent-soft"), warn: of("warn"), card: of("card") };
}

/** Return the uPlot options of an axis with pale grid lines and ticks. */
export function axis(theme, more = {}) {
  return {
    stroke: theme.soft,
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    grid: { stroke: theme.line, width: 1 },
    ticks: { show: false },
    ...more,
  };
}

/** A chart. `options(theme)` and `data` are those of uPlot; `label` describes the chart in words. */
export function Plot({ options, data, label, height = HEIGHT_PX, deps = [] }) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const element = box.current;
    const room = () => Math.max(200, element.clientWidth);
    const draw = () => {
      plot.current?.destroy();
      const all = { legend: { show: false }, cursor: { drag: { x: false, y: false } }, ...options(colours()), width: room(), height };
      plot.current = new window.uPlot(all, latest.current, element);
    };
    element.style.minHeight = `${height}px`;
    draw();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const fit = new ResizeObserver(() => {
      if (plot.current && plot.current.width !== room()) plot.current.setSize({ width: room(), height });
    });
    fit.observe(element);
    dark.addEventListener("change", draw);
    return () => {
      fit.disconnect();
      dark.removeEventListener("change", draw);
      plot.current.destroy();
      plot.current = null;
    };
  }, deps);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<figure class="plot" role="img" aria-label=${label} ref=${box}></figure>`;
}

/** Return the quantile of a histogram at a share, interpolated linearly. */
export function quantile(bounds, counts, share) {
  const all = counts.reduce((sum, n) => sum + n, 0);
  if (!all) return null;
  let below = 0;
  for (const [nth, n] of counts.entries()) {
    if (n && below + n >= share * all) {
      if (nth >= bounds.length) return bounds[bounds.length - 1];
      const low = nth ? bounds[nth - 1] : 0;
      return low + ((bounds[nth] - low) * (share * all - below)) / n;
    }
    below += n;
  }
  return bounds[bounds.length - 1];
}
