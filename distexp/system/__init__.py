"""The machine and its processes: GPUs, cores, cgroups, environment variables, signals, the Hugging Face Hub."""
