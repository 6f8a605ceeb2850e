"""GPUs of this machine: what is there, what is wrong with it, which worker gets which."""
