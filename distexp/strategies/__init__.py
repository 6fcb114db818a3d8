"""Strategies: how a model is distributed over the workers.

To add one: a module here with a subclass of ``base.Strategy``, and ``conf/strategy/NAME.yaml`` with its ``_target_``.
The other modules are helpers of FSDP, DDP and DeepSpeed. See ``docs/how-to/extend.md``.
"""
