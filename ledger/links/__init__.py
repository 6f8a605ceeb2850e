"""Links between edges and origins: transport, callers' rights and model hints."""
