"""Tool calls: one file per format."""
