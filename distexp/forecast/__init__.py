"""Forecast of a profiled run on other numbers of GPUs: ``distexp forecast``.

``command`` makes a row for each size:

1. Run: ``profiled_run`` reads it, and completes its collectives.
2. Step of a size: ``communication`` changes the work, and inserts the collectives that the strategy states. Their times
   are from measured curves, or from links and ``hardware/facts.yaml``.
3. Simulation: ``simulate`` runs the step. ``steps`` fits it to the measured median, and adds the interval.
4. Row: ``size_rows`` adds what is known of energy and measured runs. ``command`` adds the memory, and prints the rows.

No module of this package imports torch.
"""
