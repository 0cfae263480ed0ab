"""A job under simulated time: the real cores of master and workers, and everything around them that may fail.

`python -m tests.simulation` runs it; docs/reliability.md says what is simulated and what is checked.
"""
