"""The edge's own server: its sockets, its protocols, and streams that are sent without ASGI."""
