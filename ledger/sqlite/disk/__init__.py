"""The file under a ledger: `tailrace.ledger.sqlite.storage` on SQLite."""
