"""Row-wise kernels: norms, activations, embedding, rounding."""
