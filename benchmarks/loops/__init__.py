"""Training programs that the benchmarks start as processes, one per system measured.

They import torch, the system that they measure and `benchmarks.models`, `.meter`, `.steplog`: nothing that a foreign
virtual environment may lack.
"""
