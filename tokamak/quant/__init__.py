"""Number formats of weights and caches."""
