"""Load on a server, and what its clients saw of it: `tailrace bench serve`."""
