"""Record and replay regions of a step."""
