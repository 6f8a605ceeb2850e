"""The durable ledger of token streams, and the wire format that is also its record."""

if __name__ != "tailrace.ledger":  # a second name would be a second copy of every class
    raise ImportError(f"{__name__}: import tailrace.ledger instead")
