"""What edges and origins share: the transport between them, callers' rights, model hints."""
