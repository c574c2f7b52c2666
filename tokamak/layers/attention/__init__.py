"""Kinds of attention."""
