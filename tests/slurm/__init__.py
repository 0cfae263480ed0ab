"""A real Slurm on this machine, for tests."""
