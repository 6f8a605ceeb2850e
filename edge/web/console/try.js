// The first page: chat with the model, cut the network in the middle of a sentence, and lose no token.

import { announcer } from "../tailrace/announcer.js";
import { MarkdownText, plainText } from "../tailrace/markdown.js";
import { GRANULARITIES } from "../tailrace/pace.js";
import { key, needsKey } from "./api.js";
import { CUT_AFTER, FORMATS, SPEEDS, conversation } from "./chat.js";
import { Markdown } from "./markdown_view.js";
import { useModels } from "./models.js";
import { River } from "./river.js";
import { Fault, State, count, html, span, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const MODES = { chat: "Chat", text: "Continue my text" };
const QUIET = ["warn", "no token for some seconds"];
const STATES = {
  connecting: ["wait", "connecting"],
  open: ["on", "streaming"],
  suspended: ["wait", "not read; will resume"],
  waiting: ["warn", "cut off; will resume"],
  failed: ["off", "failed"],
  detached: ["", "detached"],
  ended: ["", "ended"],
};
/** Labels of the button. All are laid out on it, so that its size is the same for each of them. */
const CUTS = ["Cut the network", `Will cut after ${CUT_AFTER} tokens`, "The network is cut…"];
const COSTS = ["Tailrace frame", "server-sent event", "OpenAI chunk"];
const PROTOCOLS = { h3: "HTTP/3", h2: "HTTP/2", "http/1.1": "HTTP/1.1" };

function useConversation() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const changed = () => redraw((n) => n + 1);
    conversation.addEventListener("change", changed);
    return () => conversation.removeEventListener("change", changed);
  }, []);
  return conversation;
}

export function Try() {
  const chat = useConversation();
  const models = useModels();
  return html`<div class="try">
    <section class="talk" aria-label="Conversation">
      <header><h1>Try it</h1><ol class="steps soft"><li>Send</li><li>Cut the network</li><li>Watch it continue</li></ol></header>
      <${Turns} chat=${chat} />
      <${Spoken} chat=${chat} />
      <${Composer} chat=${chat} models=${models} />
    </section>
    <${Wire} chat=${chat} />
  </div>`;
}

function Turns({ chat }) {
  const box = useRef(null);
  const follows = useRef(true);
  // Keep the end of the text visible unless the reader has scrolled up.
  useLayoutEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  });
  // Use the event's element, not the ref: a scroll event may come after the page was left.
  const scrolled = ({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => {
    follows.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  return html`<div class="turns" ref=${box} onScroll=${scrolled} tabindex="0" role="region" aria-label="Messages">
    ${chat.turns.length === 0 &&
    html`<div class="opening">
      <p>Every token here is written to a ledger before you see it.</p>
      <p>So a connection can break at any moment, anywhere, and the next one goes on with the very next token.</p>
    </div>`}
    ${chat.turns.map((turn, nth) => html`<${Turn} key=${nth} turn=${turn} chat=${chat} />`)}
    ${chat.error && html`<${Trouble} chat=${chat} />`}
  </div>`;
}

/** Return the last text in an element that is not empty. @returns {Text | null} */
function lastText(element) {
  for (let node = element.lastChild; node; node = node.previousSibling) {
    const found = node.nodeType === Node.TEXT_NODE ? node.data.trim() && node : lastText(node);
    if (found) return found;
  }
  return null;
}

function Turn({ turn, chat }) {
  const article = useRef(null);
  const caret = useRef(null);
  // A transform moves the element without a shift of the layout.
  useLayoutEffect(() => {
    const text = caret.current && lastText(article.current);
    if (!text) return;
    const range = document.createRange();
    range.setStart(text, text.length - 1);
    range.setEnd(text, text.length);
    const [end] = [...range.getClientRects()].slice(-1);
    const box = article.current.getBoundingClientRect();
    if (end) caret.current.style.transform = `translate(${end.right - box.left}px, ${end.top - box.top}px)`;
  });
  if (turn.role === "user") return html`<p class="asked"><span class="hidden">You: </span>${turn.text}</p>`;
  const text = chat.shown(turn);
  const isMarkdown = chat.isMarkdown(turn);
  const content = isMarkdown
    ? html`<${Markdown} text=${text} cuts=${turn.cuts} />`
    : pieces(text, turn.cuts).map((piece, nth) => html`${nth > 0 && html`<i class="cutmark" aria-hidden="true"></i>`}${piece}`);
  return html`<article class=${isMarkdown ? "answer markdown" : "answer"} ref=${article} aria-busy=${turn.open ? "true" : "false"} aria-label="Answer">
    ${content}${turn.open && html`<span class="caret" ref=${caret} aria-hidden="true"></span>`}
  </article>`;
}

/** The text of a message, divided into pieces where the network was cut. */
function pieces(text, cuts = []) {
  const begin = text.length - text.trimStart().length;
  const places = [begin, ...cuts.filter((place) => place > begin && place < text.length), text.length];
  return places.slice(1).map((place, nth) => text.slice(places[nth], place));
}

function Trouble({ chat }) {
  const { error } = chat;
  if (needsKey(error)) {
    const keep = (event) => {
      event.preventDefault();
      key.set(String(new FormData(event.target).get("key")).trim());
      chat.clear();
    };
    return html`<form class="card keyform" onSubmit=${keep}>
      <label>This edge asks for an API key<input name="key" type="password" autocomplete="off" placeholder="tr_…" required /></label>
      <div class="fields"><button class="first">Use it in this tab</button></div>
    </form>`;
  }
  return html`<${Fault} error=${error} />${chat.busy && html`<button onClick=${() => chat.reconnect()}>Try again</button>`}`;
}

/** Announce a growing text to screen readers, in whole sentences, or paragraphs if they were chosen. */
function Spoken({ chat }) {
  const region = useRef(null);
  const speaker = useRef(null);
  useEffect(() => {
    const turn = chat.turns.at(-1);
    if (turn?.role !== "assistant") return;
    const granularity = chat.hand.granularity === "paragraph" ? "paragraph" : "sentence";
    const shown = chat.shown(turn);
    const last = speaker.current;
    const isSame = last?.turn === turn && last.granularity === granularity && last.wire === chat.wire;
    // A speaker that has ended takes no more text.
    if (isSame && last.isEnded) return;
    const markdown = last?.turn === turn ? last.markdown : new MarkdownText();
    const text = chat.isMarkdown(turn) ? plainText(markdown.update(shown)) : shown;
    if (!isSame) {
      region.current.textContent = "";
      speaker.current = { turn, granularity, wire: chat.wire, markdown, isEnded: false, ...announcer(region.current, { granularity }) };
      // Text that was there when the page was opened, or the setting was changed, is not announced.
      speaker.current.skip(last?.wire === chat.wire || !turn.open ? text : "");
    }
    speaker.current.isEnded = !turn.open;
    speaker.current.update(text, !turn.open);
  });
  return html`<div class="hidden" aria-live="polite" role="log" aria-label="New text of the answer" ref=${region}></div>`;
}

const SPEED_NAMES = { 0: "as it arrives", 120: "120, slow", 240: "240, as most read" };
const FORMAT_NAMES = { auto: "Markdown in chats", markdown: "Markdown", plain: "plain text" };

/** The settings of the reader: how fast, in which units, and in which format. */
function Reading({ chat }) {
  const { speed, granularity, format } = chat.hand;
  const option = (chosen, names) => (value) => html`<option value=${value} selected=${value === chosen}>${names[value] ?? value}</option>`;
  return html`<details class="settings"><summary>Pace and format</summary>
    <div class="fields">
      <label>Words a minute<select onChange=${({ target }) => chat.set({ speed: Number(target.value) })}>${SPEEDS.map(option(speed, SPEED_NAMES))}</select></label>
      <label>One step is a<select onChange=${({ target }) => chat.set({ granularity: target.value })}>${GRANULARITIES.map(option(granularity, {}))}</select></label>
      <label>Answers are<select onChange=${({ target }) => chat.set({ format: target.value })}>${FORMATS.map(option(format, FORMAT_NAMES))}</select></label>
    </div>
  </details>`;
}

/** Steer the answer that runs, or begin another one from what is shown of it. */
function Change({ chat }) {
  const [text, setText] = useState("");
  const [{ isActing, error }, setState] = useState({ isActing: false, error: null });
  const index = chat.branchIndex;
  const act = (work) => async () => {
    setState({ isActing: true, error: null });
    try {
      await work();
      setText("");
      setState({ isActing: false, error: null });
    } catch (refusal) {
      setState({ isActing: false, error: refusal });
    }
  };
  const typed = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the form around it would send another message
    if (chat.busy && text && !isActing && !event.isComposing) act(() => chat.steer(text))();
  };
  return html`<details class="settings"><summary>Steer, branch</summary>
    <div class="fields">
      <label class="wide">Text to go on with<input value=${text} maxlength="2000" placeholder=" But then" onInput=${({ target }) => setText(target.value)} onKeyDown=${typed} /></label>
      <button type="button" disabled=${!chat.busy || !text || isActing} onClick=${act(() => chat.steer(text))}>Steer</button>
      <button type="button" disabled=${index === null || isActing} onClick=${act(() => chat.branch(text ? { text } : {}))}>Branch here</button>
      <button type="button" disabled=${!chat.canInstruct || !text || isActing} onClick=${act(() => chat.branch({ instruction: text }))}>Ask here</button>
    </div>
    <p class="note">Steer inserts the text into the answer that runs. A branch is another answer that shares ${index === null ? "what is shown" : `the ${count(index)} frames that are shown`}. Ask here ends the answer there, and the text is your next message.</p>
    ${error && html`<${Fault} error=${error} />`}
  </details>`;
}

function Composer({ chat, models }) {
  const [text, setText] = useState("Once upon a time");
  const [chosen, setChosen] = useState({ model: null, mode: null, transport: "auto", maxTokens: 600 });
  const model = chosen.model ?? models?.[0] ?? "";
  const mode = chosen.mode ?? (model === "demo" ? "text" : "chat");
  const request = { model, mode, maxTokens: Number(chosen.maxTokens) || 600 };
  const canSend = !chat.busy && text.trim() && (model || models === null); // the answer asks for a key
  const change = (name) => (event) => setChosen((last) => ({ ...last, [name]: event.target.value }));
  const send = (event) => {
    event.preventDefault();
    if (!canSend) return;
    chat.send(text, { ...request, transport: chosen.transport });
    setText("");
  };
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && chat.stop();
    document.addEventListener("keydown", escape);
    return () => document.removeEventListener("keydown", escape);
  }, []);
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send}>
    <fieldset class="choice"><legend class="hidden">Task</legend>
      ${Object.entries(MODES).map(([value, said]) => html`<label><input type="radio" name="mode" value=${value} checked=${mode === value} onChange=${change("mode")} /> ${said}</label>`)}
      ${mode === "text" && html`<span class="note">The model is asked to write past its end, up to ${count(request.maxTokens)} tokens.</span>`}
    </fieldset>
    <label><span class="hidden">What to say</span>
      <textarea rows="2" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${typed} placeholder=${mode === "text" ? "The beginning of a text" : "A message"}></textarea></label>
    <div class="buttons">
      <button class="first" disabled=${!canSend}>Send</button>
      <button type="button" disabled=${!chat.busy} onClick=${() => chat.stop()} aria-keyshortcuts="Escape">Stop</button>
      <button type="button" disabled=${!chat.busy} aria-pressed=${chat.pace.isPaused ? "true" : "false"} onClick=${() => chat.togglePause()}>Pause</button>
      <button type="button" disabled=${!chat.canRegenerate} onClick=${() => chat.again()}>Again</button>
      <button type="button" class=${chat.busy ? "cut now" : "cut"} disabled=${chat.isCut} aria-pressed=${chat.armed ? "true" : "false"} onClick=${() => chat.cut()}>
        ${CUTS.map((said, nth) => html`<span class=${nth === (chat.isCut ? 2 : chat.armed ? 1 : 0) ? "" : "out"}>${said}</span>`)}
      </button>
      <button type="button" class="plain" disabled=${chat.busy || chat.turns.length === 0} onClick=${() => chat.clear()}>Clear</button>
    </div>
    <div class="drawers">
    <${Reading} chat=${chat} />
    <${Change} chat=${chat} />
    <details class="settings"><summary>Model, transport</summary>
      <div class="fields">
        <label>Model<select value=${model} onChange=${change("model")}>${(models || []).map((name) => html`<option>${name}</option>`)}</select></label>
        <label>Transport<select value=${chosen.transport} onChange=${change("transport")}>
          <option value="auto">what works</option><option value="fetch">streaming fetch</option><option value="websocket">WebSocket</option></select></label>
        <label>Maximum tokens<input type="number" min="1" max="100000" value=${chosen.maxTokens} onInput=${change("maxTokens")} /></label>
      </div>
    </details>
    <${Curl} body=${chat.input(text, request)} />
    </div>
    ${models?.length === 0 && html`<p class="warn">No model is served yet: the origins are loading, or not connected.</p>`}
  </form>`;
}

/** The same request as a command for a terminal. */
function Curl({ body }) {
  const [copied, setCopied] = useState(false);
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const allowed = key.get() ? ` -H "Authorization: Bearer $TAILRACE_API_KEY"` : "";
  const command = `curl -N ${location.origin}/v1/generate -H 'Accept: text/event-stream'${allowed} -d '${quoted}'`;
  useEffect(() => setCopied(false), [command]);
  const copy = () => navigator.clipboard.writeText(command).then(() => setCopied(true), () => {});
  return html`<details class="settings"><summary>Use this from a terminal</summary>
    <pre class="curl">${command}</pre>
    ${navigator.clipboard && html`<button type="button" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`}
  </details>`;
}

function Wire({ chat }) {
  const { wire } = chat;
  const [kind, word] = wire ? (wire.quiet ? QUIET : STATES[wire.state]) : ["", "nothing sent yet"];
  const http = PROTOCOLS[chat.protocol] || chat.protocol || "–";
  const ways = wire?.ways.length ? wire.ways.map((way) => (way === "websocket" ? "WebSocket" : http)) : [http];
  const cut = wire?.cuts.at(-1);
  const [lastAt] = wire?.points.at(-1) ?? [0];
  const rate = wire && wire.tokens > 1 ? (wire.tokens / (lastAt - wire.first)) * 1000 : null;
  return html`<aside class="wire" aria-label="The wire">
    <section class="card">
      <h2>The wire <small><${State} kind=${kind}>${word}<//></small></h2>
      <dl class="figures three">
        <div><dt>Protocol</dt><dd>${ways.join(", then ")}</dd></div>
        <div><dt>First token</dt><dd>${wire?.first == null ? "–" : span(wire.first)}</dd></div>
        <div><dt>Tokens</dt><dd>${count(wire?.tokens ?? null)}</dd></div>
        <div><dt>Tokens/s</dt><dd>${rate ? count(rate) : "–"}</dd></div>
      </dl>
      <${River} wire=${wire} />
    </section>
    <section class="card">
      <h2>The cut</h2>
      <dl class="figures">
        <div><dt>Received before the cut</dt><dd>${cut ? count(cut.had) : "–"}</dd></div>
        <div><dt>Generated while offline</dt><dd>${cut?.madeUntil == null ? "–" : count(Math.max(0, cut.madeUntil - cut.had))}</dd></div>
        <div><dt>Replayed</dt><dd>${cut ? count(cut.replayed) : "–"}</dd></div>
        <div><dt>Time to resume</dt><dd>${cut?.firstMissing == null ? "–" : span(cut.firstMissing)}</dd></div>
      </dl>
      <p class="sum">${wire?.end && cut?.madeUntil != null && html`${count(cut.had)} + ${count(wire.frames - cut.had)} frames, none lost`}</p>
      <p class="verdict">${verdict(wire, cut)}</p>
    </section>
    <section class="card">
      <h2>What happened</h2>
      <ol class="events" ref=${(at) => newest(at)} tabindex="0" aria-label="What happened">${(wire?.events || []).slice(-40).map(
        (event) => html`<li><span class="mono soft">${(event.at / 1000).toFixed(2)} s</span> ${event.what}</li>`,
      )}</ol>
      ${wire?.id && html`<p class="note"><a class="mono" href=${`#/ledger/${wire.id}`}>${wire.id.slice(0, 8)}…</a> in the ledger</p>`}
    </section>
    <section class="card">
      <h2>Bytes per token <small>computed from these tokens</small></h2>
      <${Costs} wire=${wire} />
    </section>
  </aside>`;
}

const newest = (at) => at && (at.scrollTop = at.scrollHeight);

function verdict(wire, cut) {
  if (!cut) return "Cut the network while it streams: for a second and a half nothing comes through.";
  if (cut.back == null) return "Nothing comes through. The model does not know, and goes on.";
  if (cut.firstMissing == null) return "The network is back. The client asks for the frame after the last it had…";
  return wire.end ? "Every frame came once and in order." : "The rest came from the ledger, and then live again.";
}

function Costs({ wire }) {
  const each = COSTS.map((name, nth) => /** @type {[string, number | null]} */ ([name, wire?.tokens ? wire.bytes[nth] / wire.tokens : null]));
  const most = Math.max(...each.map(([, bytes]) => bytes ?? 0), 1);
  return html`<ul class="costs">${each.map(([name, bytes], nth) => {
    const width = (at) => at && (at.style.width = `${((bytes ?? 0) / most) * 100}%`);
    return html`<li class=${nth === 0 ? "own" : ""}><span>${name}</span><b>${bytes == null ? "–" : bytes.toFixed(1)}</b><i aria-hidden="true"><i ref=${width}></i></i></li>`;
  })}</ul>`;
}
