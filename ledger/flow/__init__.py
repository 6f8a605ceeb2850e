"""Flow control and pacing: credit windows, token buckets, back-off and idle timers."""
