"""Decoder models on a CPU and on a GPU: batches of pieces in, drawn tokens out."""
