"""The origin's end of links: the connections that edges and other origins open to it."""
