"""The origin's end of the links that edges hold."""
