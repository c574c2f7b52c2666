"""Computations with one meaning and several backends."""
