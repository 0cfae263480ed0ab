"""The model-zoo module that the storms train."""
