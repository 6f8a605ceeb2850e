"""Worker processes: their slots in the supervisor, the frames to them, and their programs."""
