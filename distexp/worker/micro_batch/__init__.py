"""The search for the fastest micro-batch size that fits: ``train.micro_batch_size=auto``.

``search`` has the steps in their order. Separate processes try the sizes, one per rank. So running out of memory ends
only these processes, and the training starts as if there had been no search.
"""
