"""The objects of an origin: chats, deployments, and the runtime that hosts all classes."""
