"""The launcher for this machine."""
