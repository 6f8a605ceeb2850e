"""The Durable Streams protocol: streams as objects, on top of the ledger."""
