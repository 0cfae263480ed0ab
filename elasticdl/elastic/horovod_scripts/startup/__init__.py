"""A folder for the ``PYTHONPATH`` of a user's own program (`elasticdl.common.front_ends`); nobody imports it as a package."""
