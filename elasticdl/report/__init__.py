"""A job's history to look at: one page, as a file or live. The browser draws it, from the numbers and with what it is given."""
