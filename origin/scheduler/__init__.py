"""Which tokens the next step of an engine takes: runs and seconds in, plans out; no torch."""
