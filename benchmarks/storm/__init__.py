"""One storm of disturbances over real training on this machine; `__main__` says what is done and checked."""
