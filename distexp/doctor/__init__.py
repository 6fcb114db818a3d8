"""Is this machine fit for training, and for what? ``python -m distexp.doctor [--json]``.

Every check says what was found and, where something is amiss, how to mend it. What may break or hang
(importing torch, collectives, Slurm) runs in a process of its own with a time limit.
"""
