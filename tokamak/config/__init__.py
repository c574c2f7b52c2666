"""What was asked, and what was decided."""
