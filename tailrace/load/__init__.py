"""Load generation for `tailrace bench serve`, and statistics of what clients saw."""
