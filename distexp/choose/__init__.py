"""Search for the fastest configuration of a training: ``distexp choose``.

``command`` runs the stages of a search:

1. Candidates: ``axes`` reads what to vary, and ``space`` composes all combinations.
2. Memory: ``predictions.pruning`` removes candidates that cannot fit, from few predictions in each family.
3. Order: ``predictions.rough_forecast`` forecasts the step times.
4. Trials: ``search`` asks ``policy`` what to try within the budget, and ``trials`` runs it.
5. Result: ``loss_check`` compares the losses of the winner with those of ``single``. ``search_output`` prints it.

The state in ``trials`` stores them, so that a search can be resumed. No module trains, or imports torch.
"""
