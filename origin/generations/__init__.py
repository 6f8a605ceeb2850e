"""Generations, the streams whose frames workers make: admission, recipes and runs."""
