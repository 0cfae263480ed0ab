"""A worker in a loop that somebody else has written: its part of each batch, and steps that are made again."""
