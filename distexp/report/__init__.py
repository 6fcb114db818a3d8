"""What the records of finished runs say, side by side: on the terminal and in files.

Reads only what is on disk and never imports torch. ``frame`` makes flat rows of records, ``settings``
and ``figures`` are their two halves, ``repeats`` joins rows that differ by chance alone, ``overview``
holds all of it; ``table``, ``sentences``, ``files`` and ``compare`` draw from an overview.
"""
