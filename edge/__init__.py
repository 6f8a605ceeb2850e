"""The stateless relay between clients and an origin: killing any edge loses nothing."""

if __name__ != "tailrace.edge":  # a second name would be a second copy of every class
    raise ImportError(f"{__name__}: import tailrace.edge instead")
