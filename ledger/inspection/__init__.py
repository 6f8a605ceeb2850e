"""Tools that inspect a ledger while origins use it."""
