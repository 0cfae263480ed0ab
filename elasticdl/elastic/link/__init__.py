"""A worker and its master: the stream between them, and what travels over it."""
