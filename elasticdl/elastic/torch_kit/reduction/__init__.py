"""Gradients, buffers and votes of a step, summed over the workers."""
