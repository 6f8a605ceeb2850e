"""Pipelines: stages around a model, served as a model of their own."""
