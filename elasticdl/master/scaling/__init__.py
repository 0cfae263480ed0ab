"""How fast a job trains with how many workers: what its steps tell, and what follows for numbers that it has not had."""
