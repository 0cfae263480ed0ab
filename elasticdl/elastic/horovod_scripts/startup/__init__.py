"""A folder for the ``PYTHONPATH`` of a user's own program (`elasticdl.common.startup`); nobody imports it as a package."""
