"""Requests in, text events out: the loop, its scheduler and its processes."""
