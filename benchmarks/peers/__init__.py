"""Elastic frameworks, measured beside elasticdl: the systems, and a job of any of them that is disturbed."""
