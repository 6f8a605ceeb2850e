"""The description of an edge's HTTP API for machines: `/openapi.json` and `/llms.txt`."""
