"""Settings, logging, tasks, start and end of every Tailrace process."""
