"""`/v1/admin/…`: what operators ask an edge, which asks every origin that it is linked to."""
