"""Access to the edge: web pages, host names, proxies, connections and API keys."""
