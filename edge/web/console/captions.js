// Live captions: the sound of the microphone as a waveform, and its text while it is still revised.

import { Captioning, SHOWN_BLOCKS } from "./captioning.js";
import { useModels } from "./models.js";
import { Fault, Stat, State, bytes, count, html, useEffect, useMemo, useState } from "./ui.js";

const STATES = {
  off: ["", "off"],
  starting: ["wait", "waiting for the microphone"],
  on: ["on", "listening"],
  ending: ["wait", "completing the text"],
};
const WIDTH = 720;
const HEIGHT = 96;

function useCaptioning() {
  const captioning = useMemo(() => new Captioning(), []);
  const [, redraw] = useState(0);
  useEffect(() => {
    const changed = () => redraw((n) => n + 1);
    captioning.addEventListener("change", changed);
    return () => {
      captioning.removeEventListener("change", changed);
      captioning.stop();
    };
  }, []);
  return captioning;
}

export function Captions() {
  const captioning = useCaptioning();
  const models = useModels();
  const [chosen, setChosen] = useState("");
  const model = chosen || models?.find((name) => name.includes("caption")) || models?.[0] || "";
  const [kind, label] = STATES[captioning.state];
  const listens = captioning.state !== "off";
  return html`<div class="page captions">
    <header><h1>Live captions</h1><p>Speak, and read along. The sound and the text are both in the ledger, so cut the network, or kill anything: no word is lost.</p></header>
    <section class="card" aria-label="Microphone">
      <div class="fields">
        <label>Model<select value=${model} disabled=${listens} onChange=${(event) => setChosen(event.target.value)}>
          ${(models ?? []).map((name) => html`<option key=${name}>${name}</option>`)}
        </select></label>
        <button class="first" disabled=${!model || captioning.state === "ending"} onClick=${() => (listens ? captioning.stop() : captioning.start(model))}>
          ${listens ? "Stop listening" : "Listen"}
        </button>
        <button class="cut" aria-pressed=${String(captioning.network.isCut)} disabled=${!listens} onClick=${() => captioning.toggleNetwork()}>
          ${captioning.network.isCut ? "Mend the network" : "Cut the network"}
        </button>
        <${State} kind=${kind}>${label}<//>
      </div>
      <${Waveform} levels=${captioning.levels} />
      ${captioning.error && html`<${Fault} error=${captioning.error} />`}
    </section>
    <div class="caption" role="log" aria-label="Text">${captioning.finals.join("")}<span class="soft">${captioning.interim}</span></div>
    <section class="card">
      <h2>Revisions</h2>
      <dl class="stats">
        <${Stat} name="Sound stored">${bytes(captioning.storedBytes)}<//>
        <${Stat} name="Sound waiting">${bytes(captioning.waitingBytes)}<//>
        <${Stat} name="Reconnections">${count(captioning.resumes)}<//>
      </dl>
      <${Revisions} revisions=${captioning.revisions} />
    </section>
  </div>`;
}

/** The loudness of the newest blocks of sound, the newest on the right. */
function Waveform({ levels }) {
  const width = WIDTH / SHOWN_BLOCKS;
  const begin = SHOWN_BLOCKS - levels.length;
  const path = levels.map((level, nth) => {
    const height = Math.max(1, level * HEIGHT);
    return `M${((begin + nth + 0.5) * width).toFixed(1)} ${((HEIGHT - height) / 2).toFixed(1)}v${height.toFixed(1)}`;
  });
  return html`<svg class="waveform" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label="Loudness of the sound">
    <path d=${path.join("")} />
  </svg>`;
}

function Revisions({ revisions }) {
  if (!revisions.length) return html`<p class="soft">Each change of the text appears here.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Revisions"><table>
    <thead><tr><th class="right">Index</th><th>State</th><th class="right">Stability</th><th>Text</th></tr></thead>
    <tbody>${revisions.map(
      ({ index, text, final, stability }) => html`<tr key=${index}>
        <td class="right mono">${index}</td>
        <td>${final ? "final" : "interim"}</td>
        <td class="right mono">${stability.toFixed(2)}</td>
        <td>${text}</td>
      </tr>`,
    )}</tbody>
  </table></div>`;
}
