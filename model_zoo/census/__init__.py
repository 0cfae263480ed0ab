"""Who earns above 50,000 a year: a table of people as in the US census, made by ``generate.py``."""
