"""The samples of a step: from our own sampler, or from the loader of a script."""
