"""Decisions about models and workers, without I/O: events in, commands out."""
