"""Forecast of a profiled run on other numbers of GPUs: ``distexp forecast``.

``command`` makes a row for each size:

1. Run: ``profiled_run`` and ``measured_step`` read it. ``observed`` completes its collectives.
2. Step of a size: ``micro_batches`` and ``sharded_update`` change the work. ``communication`` inserts the collectives
   that the strategy states.
3. Times: ``collectives`` has them, from the curves in ``machine``, or from ``network`` and
   ``hardware/facts.yaml``.
4. Simulation: ``simulate`` runs the step. ``calibration`` fits it to the measured median. ``steps`` combines both.
5. Interval: ``uncertainty``.
6. Row: ``rows`` adds what ``memory``, ``energy`` and ``measured`` know. ``table`` and ``json_output`` print the rows.

No module of this package imports torch.
"""
