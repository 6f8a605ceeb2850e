"""What an edge says of itself: metrics, traces, and a name for each request."""
