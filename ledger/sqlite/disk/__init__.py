"""The file under a ledger: what stands behind `ledger.sqlite.storage`, and knows SQLite."""
