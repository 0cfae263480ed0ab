"""Elastic training for your own Keras loop."""
