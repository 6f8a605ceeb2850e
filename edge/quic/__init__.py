"""HTTP/3: the edge's QUIC server, which uses the library aioquic."""
