"""Strategies: how a model is distributed over the workers.

To add one: a module here with a subclass of ``base.Strategy``, and ``conf/strategy/NAME.yaml`` with its ``_target_``.
Modules ``ds_*`` and ``fsdp_*`` belong to the strategies ``deepspeed`` and ``fsdp``. See ``docs/how-to/extend.md``.
"""
