"""Handwritten digits, 8x8 pixels: small enough to train in seconds on one core, real enough to mean something."""
