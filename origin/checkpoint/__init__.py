"""What lies in the folder of a checkpoint, and whether it can be served: read without torch."""
