"""The edge's end of its links to origins."""
