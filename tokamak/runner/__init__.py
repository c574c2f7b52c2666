"""One rank: a plan in, token ids out."""
