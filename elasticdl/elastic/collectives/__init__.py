"""The port to a library that moves tensors between workers, and what is behind it."""
