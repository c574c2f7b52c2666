"""Values that cross layers."""
