"""Durable Objects: classes, gates, storage, alarms, crons and deployments."""
