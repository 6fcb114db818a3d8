"""Search for the fastest configuration of a training: ``distexp choose``.

``space`` lists the candidates, ``pruning`` removes those that cannot fit, ``order`` forecasts the step times of the
others, and ``halving`` decides which of them to try. None of them starts a process of a training, or imports torch.
"""
