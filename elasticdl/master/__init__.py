"""The master of one job: it decides who is in the world, starts and replaces workers, and keeps the job's history."""
