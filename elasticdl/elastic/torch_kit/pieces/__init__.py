"""What a training state with PyTorch is made of."""
