"""The elastic loop and the training state that all frameworks share."""
