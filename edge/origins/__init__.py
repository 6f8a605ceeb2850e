"""The edge's side of its links to origins: connections, load balancing and routing of frames."""
