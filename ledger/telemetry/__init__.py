"""Metrics and traces of edges and origins, for Prometheus and OpenTelemetry."""
