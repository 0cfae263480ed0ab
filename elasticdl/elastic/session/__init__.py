"""A worker's session with its master."""
