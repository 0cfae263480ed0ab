"""What a training script of one's own calls, for every framework."""
