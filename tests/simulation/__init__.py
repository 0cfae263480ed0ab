"""A job under simulated time: the real cores of master and workers, and everything around them that may fail.

`python -m tests.simulation` runs it; docs/reliability_tests.md says what is simulated and what is checked.
"""
