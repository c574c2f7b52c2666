"""The `tokamak` command."""
