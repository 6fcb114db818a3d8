"""Explanation of a profiled run: what its steps spend their time on, and what would make them faster.

``step_profile`` reads the parts of a step from a record. ``explanation`` finds the bottleneck, ``sentences`` describes
it, and ``advice`` lists overrides that would reduce it. ``profile_comparison`` compares two runs.
"""
