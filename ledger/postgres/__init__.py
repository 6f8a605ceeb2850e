"""The ledger in a PostgreSQL database that several origins share."""
