"""The machine and its processes: files, cores, cgroups, signals, and private APIs of PyTorch."""
