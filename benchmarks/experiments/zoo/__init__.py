"""Models for the experiments: those of `model_zoo`, on real GPUs as they are."""
