"""Who is let in: pages, proxies, connections, keys."""
