"""Weights on disk to parameters on a rank."""
