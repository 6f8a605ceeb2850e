"""The stateless relay between clients and an origin: killing any edge loses nothing."""
