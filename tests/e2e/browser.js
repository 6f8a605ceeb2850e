// What a page does with an edge, for test_browser.py.

const SSE = { Accept: "text/event-stream" };

/** POSTs a request and reads its events; aborts when it has `enough` of them. */
async function generate(url, body, enough = Infinity) {
  const abort = new AbortController();
  const response = await fetch(url, {
    method: "POST",
    headers: { ...SSE, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: abort.signal,
  });
  const got = {
    stream: response.headers.get("Tailrace-Stream"),
    token: response.headers.get("Tailrace-Token"),
    text: "", last: -1, pieces: 0, aborted: false,
  };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return got;
    window.pieces = got.pieces += 1;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const fields = Object.fromEntries(event.split("\n").map(line => line.split(/: (.*)/s)));
      if (fields.data === undefined || fields.event !== undefined) continue;
      got.text += JSON.parse(fields.data).text;
      got.last = Number(fields.id);
      if (got.last + 1 >= enough) {
        abort.abort();
        await reader.read().catch(() => { got.aborted = true; });
        return got;
      }
    }
  }
}

/** Reads a stream by EventSource to its end. */
function listen(url) {
  window.progress = 0;
  return new Promise(resolve => {
    const got = { text: "", ids: [], total: null };
    const source = new EventSource(url);
    source.onmessage = event => {
      got.text += JSON.parse(event.data).text;
      got.ids.push(Number(event.lastEventId));
      window.progress = got.ids.length;
    };
    source.addEventListener("end", event => {
      got.ids.push(Number(event.lastEventId));
      got.total = JSON.parse(event.data).total_tokens;
      source.close();
      resolve(got);
    });
  });
}

let received = [];
let wanting = null;
let socket = null;

/** Opens a WebSocket and sends the bytes of `first`, in base64. */
function connect(url, first) {
  return new Promise((resolve, reject) => {
    socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      socket.send(Uint8Array.from(atob(first), character => character.charCodeAt(0)));
      resolve("open");
    };
    socket.onerror = () => reject(new Error("refused"));
    socket.onmessage = event => {
      received.push(btoa(String.fromCharCode(...new Uint8Array(event.data))));
      if (wanting !== null) wanting();
    };
  });
}

/** The next message that has come, in base64. */
async function nextMessage() {
  if (received.length === 0) await new Promise(resolve => { wanting = resolve; });
  wanting = null;
  return received.shift();
}

/** How the last fetch of a URL came, once the browser knows. */
function protocolOf(url) {
  const found = performance.getEntriesByType("resource").filter(entry => entry.name.startsWith(url));
  return found.length ? found.at(-1).nextHopProtocol : "";
}
