"""HTTP/3: the edge's server, and its implementation of QUIC on aioquic."""
