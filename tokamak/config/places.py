"""Which variable names the folder that fetched and parsed models are kept in.

A file of its own, so that an engine process learns it without building the options model.
"""

CACHE_VARIABLE = "TOKAMAK_CACHE"
"""Where fetched and parsed models are kept. Read by `checkpoint/`; a place on disk, not an option."""
