"""HTTP bodies as pydantic models."""
