"""Decoder models on a CPU or a GPU, which draw the next tokens of the sequences in a batch."""
