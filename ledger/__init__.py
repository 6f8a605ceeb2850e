"""The durable ledger of token streams, and the wire format in which it stores their frames."""

# Under a second name, Python would create every class twice, and isinstance would fail.
if __name__ != "tailrace.ledger":
    raise ImportError(f"{__name__}: import tailrace.ledger instead")
