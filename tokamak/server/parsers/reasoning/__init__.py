"""Reasoning: one file per format."""
