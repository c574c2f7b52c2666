"""The parts models are built from."""
