"""What is done row by row: norms, activations, embedding, rounding."""
