"""Linear layers: float, ternary and int8, each kernel beside its oracle."""
