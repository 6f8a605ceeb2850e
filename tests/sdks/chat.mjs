// The AI SDK's chat, without a framework: what useChat keeps in React are plain fields here.

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

/** The class of a chat by one major version of the AI SDK. */
export const chatOf = ({ AbstractChat, DefaultChatTransport }) =>
  class extends AbstractChat {
    constructor({ url, body, messages, ...more }) {
      super({
        transport: new DefaultChatTransport({ api: `${url}/api/chat`, body }),
        ...more,
        state: new State(messages),
      });
    }
  };
