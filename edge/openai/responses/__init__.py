"""The Responses API, `/v1/responses`: its requests, its events, and its routes."""
