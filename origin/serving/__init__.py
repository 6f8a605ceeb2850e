"""Carries out what `origin.core` decides about models, and plans their memory."""
