"""Those who hear what happens to a job and have no say in it: journal, metrics, summary."""
