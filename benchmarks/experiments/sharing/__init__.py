"""Experiment 4: several jobs that scale unequally share a cluster."""
