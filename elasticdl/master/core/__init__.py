"""The decisions of a master: pure, without I/O, threads or a clock."""
