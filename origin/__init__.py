"""The origin: a supervisor that admits and records streams, and workers that generate them."""

if __name__ != "tailrace.origin":  # a second name would be a second copy of every class
    raise ImportError(f"{__name__}: import tailrace.origin instead")
