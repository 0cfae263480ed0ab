"""What a master knows of its job: workers, worlds, training, what was learnt; events that it hears and instructions that it gives. Pure."""
