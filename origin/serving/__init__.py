"""The models that an origin serves beside each other: their settings, and what is known of each."""
