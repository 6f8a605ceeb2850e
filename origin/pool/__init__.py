"""The pool of models: settings, members, policies, history and shadow pool.

The decisions about the pool are made in `origin.core`.
"""
