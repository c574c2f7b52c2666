"""Model families; each one reads alone."""
