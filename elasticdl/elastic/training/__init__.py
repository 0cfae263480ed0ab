"""The training thread: its driver, the state of a training, and the way through its data."""
