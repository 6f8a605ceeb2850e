"""The file of settings that Workers have, and what it says to an edge of ours."""
