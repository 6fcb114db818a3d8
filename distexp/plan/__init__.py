"""Prediction of the memory of a training, without running it: ``distexp plan``.

``tracing`` records a step with fake tensors, ``replay`` replays it on a model of the caching allocator, and ``verdict``
compares the result with the memory of a GPU. ``planner`` starts the processes that do this, and never imports torch.
The sampling of real memory is in ``distexp.measure.memory``.
"""
