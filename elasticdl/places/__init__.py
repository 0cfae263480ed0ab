"""Where worker processes come from. `base` is the port; each other module is one kind of place to run them."""
