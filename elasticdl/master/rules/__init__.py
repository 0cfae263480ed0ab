"""Rules look at the job and say what is to be done: who is stuck, slow or silent, and how many workers pay. Pure."""
