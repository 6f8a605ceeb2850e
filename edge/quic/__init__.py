"""HTTP/3: our server over a QUIC core that can be swapped."""
