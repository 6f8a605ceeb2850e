"""The scheduler of an engine: decides which tokens the next step takes; no torch and no clock."""
