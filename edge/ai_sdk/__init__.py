"""The AI SDK's chat: its UI-message stream, as a view of the same streams."""
