"""The origin: a supervisor that admits and records streams, and workers that generate them."""
