"""Communication bandwidth test before training: ``distexp preflight``."""
