"""The pool of models: settings, members, policies, history and shadow; `origin.core` decides."""
