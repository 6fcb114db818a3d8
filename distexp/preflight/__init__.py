"""Is the interconnect healthy? ``python -m distexp.preflight [cluster=... cluster.nodes=2]``."""
