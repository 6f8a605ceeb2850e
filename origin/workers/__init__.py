"""Worker processes: their slots, what is said to them, and the programs that they run."""
