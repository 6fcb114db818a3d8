"""Communication bandwidth test before training. ``distexp preflight [cluster=... cluster.nodes=2]``."""
