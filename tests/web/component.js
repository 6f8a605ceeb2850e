// A component that shows a stream at an even pace, mounted twice as React's StrictMode does.

import { StrictMode, createElement, useState } from "react";
import { createRoot } from "react-dom/client";
import { stream } from "../../edge/web/tailrace/index.js";
import { useStream } from "../../edge/web/tailrace/react.js";
import { smooth } from "../../edge/web/tailrace/smooth.js";

window.posts = 0;
const counted = window.fetch;
window.fetch = (url, init) => {
  window.posts += init?.method === "POST" && !String(url).endsWith("/cancel") ? 1 : 0;
  return counted(url, init);
};

function Answer({ reading }) {
  const { text, state, end, cancel } = useStream(reading, smooth);
  window.reason = end?.finish_reason;
  if (end) window.textAtEnd ??= text;
  const stop = async () => (window.cancelled = await cancel());
  return createElement("div", null,
    createElement("output", { id: "state", value: state }, state),
    createElement("p", { id: "answer" }, text),
    createElement("button", { onClick: stop }, "Stop"));
}

function App() {
  const [reading, setReading] = useState(null);
  const [isShown, show] = useState(true);
  window.reading = reading;
  const ask = () => setReading(stream("/v1/generate", { input: { model: "demo", prompt: "words" } }));
  return createElement("div", null,
    createElement("button", { onClick: ask }, "Ask"),
    createElement("button", { onClick: () => show(false) }, "Hide"),
    createElement("button", { onClick: () => show(true) }, "Show"),
    isShown && createElement(Answer, { reading }));
}

createRoot(document.getElementById("root")).render(createElement(StrictMode, null, createElement(App)));
