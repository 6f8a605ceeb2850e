"""Pipelines: a model with stages before and after it, served to clients as one model."""
