"""DeepSpeed's configuration, models and C++ operators, for the strategy ``deepspeed``."""
