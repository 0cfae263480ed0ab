"""What every front end of PyTorch is built of: the reduction of gradients, the pieces of a training state, data in parts, the participant."""
