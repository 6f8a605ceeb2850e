// The AI SDK's chat, without a framework: what useChat keeps in React are plain fields here.

import { AbstractChat, DefaultChatTransport } from "ai";

class State {
  status = "ready";
  error = undefined;
  constructor(messages = []) {
    this.messages = messages;
  }
  pushMessage = (message) => void this.messages.push(message);
  popMessage = () => void this.messages.pop();
  replaceMessage = (at, message) => void (this.messages[at] = message);
  snapshot = (value) => structuredClone(value);
}

export class Chat extends AbstractChat {
  constructor({ url, body, messages, ...more }) {
    super({
      ...more,
      state: new State(messages),
      transport: new DefaultChatTransport({ api: `${url}/api/chat`, body }),
    });
  }
}
