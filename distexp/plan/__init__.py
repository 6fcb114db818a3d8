"""Memory of a training, computed without running it.

So far: parameters, gradients and optimizer states by arithmetic. The number of parameters of a model that is not built
comes from ``distexp.resolve.parameter_count``. The sampling of real memory is in ``distexp.measure.memory``.
"""
