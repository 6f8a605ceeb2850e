"""Stages that turn sound into text."""
