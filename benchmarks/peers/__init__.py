"""Training loops that ``benchmarks/speed.py`` compares distexp with. Each is a program with one measurement."""
