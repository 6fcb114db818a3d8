"""Explanation of a profiled run: what its steps spend their time on, and what would reduce it."""
