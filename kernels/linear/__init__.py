"""Linear layers: float, ternary and int8, each kernel with its reference."""
