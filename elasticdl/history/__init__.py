"""A job's history, computed from its journal: who did what when, and where the time went. Pure: time comes with the entries."""
