"""The origin: a supervisor that admits and records streams, and workers that generate them."""

# Under another name, Python would create a second copy of every module and class.
if __name__ != "tailrace.origin":
    raise ImportError(f"{__name__}: import tailrace.origin instead")
