"""Facts of GPUs, links, networks and processes: ``facts.yaml`` has the values, ``facts`` reads and finds them.

To add a GPU, add an entry to ``facts.yaml``. No module of this package imports torch or another package of distexp.
"""
