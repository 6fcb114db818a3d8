"""Benchmarks of distexp's speed and overhead, and of the accuracy of plan, choose, explain and forecast.

They are scripts and not tests: run them on an idle machine.
"""
