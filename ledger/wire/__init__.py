"""Bytes on the wire: BARE, the schema, the codec, splitting."""
