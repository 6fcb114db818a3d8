"""Facts of GPUs, links, networks and processes: ``facts.yaml`` has the values, ``facts`` finds them. No torch here."""
