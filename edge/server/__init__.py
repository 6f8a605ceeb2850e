"""The edge's own server: its sockets and protocols, and the way of a token past ASGI."""
