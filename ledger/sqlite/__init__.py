"""The ledger in one SQLite file: tails in memory, group commit, segments and retention."""
