"""Search for the fastest configuration of a training: ``distexp choose``.

``command`` runs the stages of a search:

1. Command: ``settings`` reads it. ``space_entries``, ``space_checks`` and ``axes`` read what to vary.
2. Candidates: ``space`` combines the axes with ``strategy_choices`` and ``cluster_sizes``.
3. Memory: ``pruning`` removes candidates that cannot fit, from the predictions in ``family_memory``.
4. Order: ``rough_forecast`` forecasts the step times from the speeds in ``machine_speeds``.
5. Trials: ``search`` decides what to try within the ``trial_budget``, and ``trials`` runs it.
6. Result: ``loss_check`` compares the losses of the winner with those of ``single``. ``print_outcome`` prints it.

``state`` stores the trials, so that a search can be resumed. No module trains, or imports torch.
"""
