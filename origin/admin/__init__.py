"""What operators are told of an origin: the far end of an edge's `/v1/admin/…`."""
