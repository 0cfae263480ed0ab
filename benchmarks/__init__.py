"""Measurements: throughput, rescale and master_scale, each `python -m benchmarks.NAME`; see docs/benchmarks.md.

They start real jobs and read what these leave behind (journals, step logs). Nothing in the package imports this.
"""
