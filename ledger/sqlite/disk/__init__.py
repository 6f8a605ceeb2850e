"""The SQLite file of a ledger: implements the interface `tailrace.ledger.sqlite.storage`."""
