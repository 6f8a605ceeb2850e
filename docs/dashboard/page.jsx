// The dashboard as Grafana draws it: its own panels, from `window.recorded`, which draw.py sets.
// A panel of Grafana's application is an `@grafana/ui` TimeSeries in a PanelChrome, given frames
// of data whose fields carry the dashboard's `fieldConfig`; that is all there is to it here.

import { createTheme, dateTime, FieldType, getDisplayProcessor, toDataFrame } from "@grafana/data";
import { GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from "@grafana/ui";
import { createRoot } from "react-dom/client";

// Grafana's grid: 24 columns, rows of 30 px, 8 px between.
const WIDTH = 1400;
const GAP = 8;
const ROW = 30 + GAP;
const COLUMN = (WIDTH - GAP) / 24;

const theme = createTheme({ colors: { mode: "light" } });
const { begun, ended, board, series } = window.recorded;
const [from, to] = [dateTime(begun * 1000), dateTime(ended * 1000)];
const timeRange = { from, to, raw: { from, to } };

/** A quantile of nothing is "NaN", and is no point. */
const numberOf = ([, said]) => (Number.isFinite(+said) ? +said : null);

function frameOf({ name, points }, defaults, seriesIndex) {
  const config = { color: { mode: "palette-classic" }, ...defaults, displayName: name };
  const frame = toDataFrame({
    fields: [
      { name: "Time", type: FieldType.time, values: points.map(([at]) => at * 1000) },
      { name, type: FieldType.number, config, values: points.map(numberOf) },
    ],
  });
  const field = frame.fields[1];
  field.state = { seriesIndex, displayName: name };
  for (const each of frame.fields) each.display = getDisplayProcessor({ field: each, theme });
  return frame;
}

function Plot({ panel, width, height }) {
  const defaults = panel.fieldConfig.defaults;
  const frames = series[panel.id].map((one, nth) => frameOf(one, defaults, nth));
  if (!frames.length) return <p className="none">No data</p>;
  const legend = { showLegend: true, calcs: [], ...panel.options.legend };
  return (
    <TimeSeries
      {...{ frames, timeRange, width, height, legend, options: panel.options }}
      timeZone="utc"
    />
  );
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: "absolute", left: GAP + x * COLUMN, top: y * ROW };
  if (panel.type === "row") return <h4 style={{ ...place, margin: 6 }}>{panel.title}</h4>;
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={w * COLUMN - GAP} height={h * ROW - GAP}>
        {(width, height) => <Plot {...{ panel, width, height }} />}
      </PanelChrome>
    </div>
  );
}

const height = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * ROW;
createRoot(document.body).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <main style={{ position: "relative", width: WIDTH, height }}>
      {board.panels.map((panel) => (
        <Panel key={panel.id} panel={panel} />
      ))}
    </main>
  </ThemeContext.Provider>,
);
