"""The GPUs of this machine: a list of them, their faults, and which worker gets which GPU."""
