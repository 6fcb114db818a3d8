"""Launcher for this machine."""
