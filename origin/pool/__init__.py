"""Members, policies, history and shadow of the pool of models; `origin.core` decides."""
