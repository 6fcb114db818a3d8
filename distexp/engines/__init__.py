"""Trainers (config group ``engine``): they run a training loop, native or of another library."""
