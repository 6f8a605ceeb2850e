"""Load generation for `tailrace bench serve`, and statistics of the clients' measurements."""
