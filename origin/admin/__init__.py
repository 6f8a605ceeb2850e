"""The origin's side of the admin API, `/v1/admin/…` of an edge."""
