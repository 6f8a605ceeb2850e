"""The rules that decide who may use an edge: pages, host names, proxies, connections, API keys."""
