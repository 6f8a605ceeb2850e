"""`/v1/responses`: its events and items, numbered from the log, and its routes."""
