"""Search for the fastest configuration of a training: ``distexp choose``.

``space`` lists the candidates, and ``pruning`` removes those that cannot fit. ``rough_forecast`` forecasts the step
times of the others, and ``halving`` decides which of them to try. None of them starts a training, or imports torch.
"""
