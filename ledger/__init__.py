"""The durable ledger of token streams, and the wire format that is also its record."""
