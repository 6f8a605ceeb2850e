// One stream in the ledger: its request and its frames, with a slider over time.

import { ApiError, ask, usePolled } from "./api.js";
import { Plot, axis } from "./charts.js";
import { Ended } from "./streams.js";
import { Fault, Page, Stat, State, bytes, clock, count, date, html, span, useEffect, useMemo, useRef, useState, words } from "./ui.js";

const PAGE_FRAMES = 1000;
/** Maximum frames of a stream that are fetched. A longer stream is cut there, and the page says so. */
const MOST_FRAMES = 10_000;
const ID = /^[0-9a-f]{32}$/;

export function Ledger({ rest: [id] }) {
  return html`<${Page} title="Ledger" about="Every frame that a client was ever shown is here first. Look a stream up, and watch it happen again.">
    <${LookUp} id=${id || ""} />
    ${id ? (ID.test(id) ? html`<${Stream} key=${id} id=${id} />` : html`<${Fault} error=${new ApiError(400, { message: "This is not the id of a stream.", hint: "An id has 32 hex digits." })} />`) : html`<${Sizes} />`}
  <//>`;
}

function LookUp({ id }) {
  const [text, setText] = useState(id);
  useEffect(() => setText(id), [id]);
  const submit = (event) => {
    event.preventDefault();
    location.hash = `#/ledger/${text.trim().toLowerCase()}`;
  };
  return html`<form class="fields lookup" role="search" onSubmit=${submit}>
    <label>Stream<input class="mono" value=${text} onInput=${(event) => setText(event.target.value)} placeholder="32 hex digits, as in Tailrace-Stream" spellcheck="false" required /></label>
    <button class="first">Look it up</button>
  </form>`;
}

function Sizes() {
  const { data, error } = usePolled((signal) => ask("ledger", { signal }), [], 2000);
  const lately = usePolled((signal) => ask("streams", { query: { limit: 0 }, signal }), [], 2000);
  return html`
    ${error && html`<${Fault} error=${error} />`}
    <div class="columns">${data?.origins.map(
      (one) => html`<section class="card" key=${one.origin}>
        <h2><span class="mono">${one.origin}</span> <small class="mono">${one.ledger}</small></h2>
        ${one.error
          ? html`<p class="warn">${one.error.message}</p>`
          : html`<dl class="stats">
              <${Stat} name="Used">${bytes(one.used_bytes)}<//>
              ${one.wal_bytes != null && html`<${Stat} name="WAL">${bytes(one.wal_bytes)}<//>`}
              ${one.disk_free_bytes != null && html`<${Stat} name="Free on the disk">${bytes(one.disk_free_bytes)}<//>`}
              <${Stat} name="Database responding">${one.silent_s > 0.05 ? `no, for ${span(one.silent_s * 1000)}` : "yes"}<//>
            </dl>`}
      </section>`,
    )}</div>
    <${Ended} ended=${lately.data?.ended} most=${24} />`;
}

function Stream({ id }) {
  const [text, setText] = useState(false);
  const { data, error } = usePolled((signal) => ask(`streams/${id}`, { signal }), [id], (told) => (told?.ended ? 30_000 : 1000));
  const frames = useFrames(id, data?.next_index, text);
  if (!data) return error ? html`<${Fault} error=${error} />` : null;
  return html`
    <${Facts} data=${data} />
    <${Scrub} data=${data} frames=${frames.list} error=${frames.error} text=${text} setText=${setText} />`;
}

/** Load the frames, then new ones as they are written. Switching text on or off loads all again. */
function useFrames(id, upTo, text) {
  const [told, setTold] = useState({ list: [], text, error: null });
  const fetching = useRef(null);
  useEffect(() => () => fetching.current?.abort(), [id, text]);
  useEffect(() => {
    const have = told.text === text ? told.list : [];
    if (upTo == null || have.length >= Math.min(upTo, MOST_FRAMES)) return;
    if (fetching.current && !fetching.current.signal.aborted) return;
    const mine = (fetching.current = new AbortController());
    const query = { start: have.length, limit: PAGE_FRAMES, text: text ? 1 : 0 };
    ask(`streams/${id}/frames`, { query, signal: mine.signal })
      .then(({ frames }) => {
        fetching.current = null;
        setTold({ list: [...have, ...frames], text, error: null });
      })
      .catch((error) => {
        if (mine.signal.aborted) return;
        fetching.current = null;
        setTold({ list: have, text, error });
      });
  }, [id, upTo, text, told]);
  return told.text === text ? told : { list: [], error: null };
}

function Facts({ data }) {
  const { end, live, lately, life, recipe } = data;
  const state = live ? ["on", live.state] : end ? [end.retryable ? "off" : "", `ended: ${words(end.finish_reason)}`] : ["wait", "unfinished, and not at this origin"];
  const now = live || lately;
  const chosen = Object.entries(recipe.sampling).map(([name, value]) => `${words(name)} ${value}`);
  return html`<section class="card">
    <h2><span class="mono">${data.id}</span> <small><${State} kind=${state[0]}>${state[1]}<//></small></h2>
    ${end?.message && html`<p class=${end.retryable ? "bad" : "soft"}>${end.finish_reason === "stop" ? `Ended at the stop sequence ${JSON.stringify(end.message)}.` : end.message}</p>`}
    <dl class="stats">
      <${Stat} name="Tokens">${count(end ? end.total_tokens : live?.tokens)}<//>
      <${Stat} name="Prompt tokens">${count(recipe.prompt_tokens)}<//>
      <${Stat} name="Frames">${count(data.next_index)}<//>
      <${Stat} name="Resumes">${count(life?.resumes ?? now?.resumes)}<//>
      <${Stat} name="Takeovers">${count(data.epoch - 1)}<//>
    </dl>
    ${life && html`<dl class="stats life">
      <${Stat} name="Waited for a worker">${span(life.queue_ms)}<//>
      <${Stat} name="First frame">${span(life.first_ms)}<//>
      <${Stat} name="Total">${span(life.whole_ms)}<//>
      <${Stat} name="Between frames: p50, p95, p99">${[life.gap_p50_ms, life.gap_p95_ms, life.gap_p99_ms].map(span).join(" · ")}<//>
    </dl>`}
    ${now?.time && html`<${TimeSpent} time=${now.time} />`}
    <details>
      <summary>Request</summary>
      <dl class="pairs">
        <dt>Model</dt><dd>${recipe.model} <span class="soft mono">${recipe.fingerprint.slice(0, 16)}</span></dd>
        <dt>Began</dt><dd>${date(data.created_ms)}</dd>
        <dt>Tenant</dt><dd>${data.tenant || "–"}</dd>
        <dt>Origin</dt><dd class="mono">${data.origin}</dd>
        <dt>Priority</dt><dd>${recipe.priority}; at most ${count(recipe.max_tokens)} tokens; unread: ${recipe.unread}</dd>
        <dt>Durability</dt><dd>${data.durability}</dd>
        <dt>Sampling</dt><dd>${chosen.join(", ")}</dd>
      </dl>
    </details>
  </section>`;
}

const PARTS = { queue: "In the queue", prefill: "Until output", decode: "Output", batch: "Batch", ledger: "Commits", relay: "Relay", away: "No reader" };

/** Where the time of a stream went: its phases, which add up, then parts of them, then stages of a pipeline. */
function TimeSpent({ time: { stages = {}, ...parts } }) {
  const stat = (name, seconds) => html`<${Stat} name=${name}>${span(seconds * 1000)}<//>`;
  return html`<dl class="stats life">
    ${Object.entries(PARTS).map(([part, name]) => stat(name, parts[part]))}
    ${Object.entries(stages).map(([stage, seconds]) => stat(`Stage ${stage}`, seconds))}
  </dl>`;
}

function Scrub({ data, frames, error, text, setText }) {
  const [at, setAt] = useState(null); // null: the last frame
  const [plays, setPlays] = useState(false);
  const last = Math.max(0, frames.length - 1);
  const place = at == null ? last : Math.min(at, last);
  const frame = frames[place];
  const timed = useMemo(() => frames.filter((one) => one.at_ms != null), [frames]);
  const began = timed[0]?.at_ms;
  usePlaying(plays, frames, place, setAt, () => setPlays(false));
  const said = useMemo(() => spoken(frames, place), [frames, place]);
  const play = () => {
    if (place >= last) setAt(0);
    setPlays(!plays);
  };
  return html`<section class="card scrub">
    <h2>Frames <small>${frames.length < data.next_index ? `the first ${count(frames.length)} of ${count(data.next_index)}` : `${count(frames.length)}, ${bytes(frames.reduce((sum, one) => sum + one.bytes, 0))} on the wire`}</small></h2>
    ${error && html`<${Fault} error=${error} />`}
    <div class="fields">
      <button onClick=${play} disabled=${frames.length < 2}>${plays ? "Pause" : "Play"}</button>
      <label class="slider"><span>Frame <b>${count(place)}</b>${frame?.at_ms != null && began != null && html`, ${span(frame.at_ms - began)} after the first`}</span>
        <input type="range" min="0" max=${last} value=${place} onInput=${(event) => { setPlays(false); setAt(Number(event.target.value)); }} aria-valuetext=${frame ? `frame ${place}, ${words(frame.type)}` : "no frame"} /></label>
      <label class="check"><input type="checkbox" checked=${text} onChange=${(event) => setText(event.target.checked)} /> Show text <span class="soft">(access is logged)</span></label>
    </div>
    ${timed.length > 1 ? html`<${Gaps} frames=${timed} place=${place} />` : frames.length > 0 && html`<p class="note">When these frames came is no longer known: an origin keeps the times of the last 512 streams that ended there. Their order is kept.</p>`}
    ${frame && html`<dl class="pairs">
      <dt>Type</dt><dd>${frame.type}</dd>
      <dt>Released</dt><dd>${clock(frame.at_ms)}</dd>
      <dt>On the wire</dt><dd>${count(frame.bytes)} bytes, ${count(frame.tokens)} ${frame.tokens === 1 ? "token" : "tokens"}</dd>
      ${frame.message && html`<dt>Message</dt><dd>${frame.message}</dd>`}
    </dl>`}
    ${text && html`<div class="said" tabindex="0" role="region" aria-label="Text up to this frame">${said}</div>`}
  </section>`;
}

/** Return the text of the frames up to number `place`, with revisions applied. */
function spoken(frames, place) {
  let parts = [];
  for (const one of frames.slice(0, place + 1)) {
    if (one.type === "Revision") parts = parts.filter(([index]) => index < one.replaces);
    if (one.type === "Token" || one.type === "ScoredToken" || one.type === "Revision") parts.push([one.index, one.text ?? ""]);
  }
  return parts.map(([, part]) => part).join("");
}

/** Play the frames at the stream’s own speed, or 20 frames a second if their times are unknown. */
function usePlaying(plays, frames, place, setAt, done) {
  useEffect(() => {
    if (!plays) return undefined;
    if (place >= frames.length - 1) {
      done();
      return undefined;
    }
    const [one, next] = [frames[place], frames[place + 1]];
    const gap = one.at_ms != null && next.at_ms != null ? next.at_ms - one.at_ms : 50;
    const timer = setTimeout(() => setAt(place + 1), Math.min(2000, Math.max(4, gap)));
    return () => clearTimeout(timer);
  }, [plays, place, frames]);
}

function Gaps({ frames, place }) {
  const here = useRef(place);
  here.current = place;
  const data = useMemo(() => {
    const gaps = frames.map((one, nth) => (nth ? one.at_ms - frames[nth - 1].at_ms : null));
    return [frames.map((one) => one.index), gaps, frames.map((one, nth) => (one.index === place ? gaps[nth] ?? 0 : null))];
  }, [frames, place]);
  const longest = Math.max(...data[1]);
  return html`<${Plot} data=${data} height=${170} deps=${[]} label=${`Time before each frame; the longest is ${span(longest)}`} options=${(theme) => ({
    scales: { x: { time: false } },
    axes: [axis(theme, { size: 28, grid: { show: false }, values: (_, at) => at.map((n) => (Number.isInteger(n) ? String(n) : "")) }), axis(theme, { size: 62, values: (_, at) => at.map((n) => span(n)) })],
    series: [
      {},
      { stroke: theme.soft, fill: theme.line, width: 1, paths: window.uPlot.paths.stepped({ align: -1 }), points: { show: false } },
      { stroke: theme.accent, width: 0, points: { show: true, size: 9, fill: theme.accent, stroke: theme.card, width: 2 } },
    ],
  })} />`;
}
