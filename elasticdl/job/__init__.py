"""A job as all sides know it: its specification, its folder, its journal, and what a journal says of it."""
