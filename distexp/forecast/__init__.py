"""Forecast of a profiled run on other numbers of GPUs: ``distexp forecast``.

``command`` makes a row for each size:

1. Run: ``profiled_run`` and ``measured_step`` read it, and complete its collectives.
2. Step of a size: ``communication`` changes the work, and inserts the collectives that the strategy states.
3. Times: ``collectives`` has them, from measured curves, or from links and ``hardware/facts.yaml``.
4. Simulation: ``simulate`` runs the step. ``steps`` fits it to the measured median, and adds the interval.
5. Row: ``size_rows`` adds what is known of memory, energy and measured runs. ``forecast_table`` prints the rows.

No module of this package imports torch.
"""
