"""Draft tokens ahead of the model, then verify them."""
