"""Chats: `/v1/chats/{id}` follows, lists and stops the turns of a conversation."""
