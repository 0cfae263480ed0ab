"""A master at work: gRPC, sessions, access, the loop around the core, what is saved, entry points."""
