"""The engine of token workers, and the path of a token from the model to a frame."""
