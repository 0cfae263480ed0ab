"""What a worker decides and computes without I/O: world, vote, batch plan, order, learning rate, pauses."""
