"""Reads and checks the folder of a checkpoint, without torch."""
