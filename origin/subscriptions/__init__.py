"""Subscriptions of the Durable Streams protocol: wake-ups, webhooks and claims."""
