"""Reports of finished runs: tables on the terminal, result files and a page.

Only reads what is on disk, and never imports torch. ``data`` makes rows of records and compares them (``Overview``).
All output is made from an ``Overview``: ``table`` and ``compare`` for the terminal, ``files`` for the rest.
"""
