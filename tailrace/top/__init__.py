"""Live streams, rates and the warm pool, for a terminal: `tailrace top`."""
