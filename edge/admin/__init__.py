"""`/v1/admin/…`: operators' queries, which an edge forwards to all its origins."""
