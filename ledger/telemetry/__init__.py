"""What edges and origins count and trace, as Prometheus and OpenTelemetry have it."""
