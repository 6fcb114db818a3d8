"""Import of torch's compiler ahead of the workers, with the hashes that are part of the keys of its cache.

``torch.compile`` imports inductor when it is first used, and hashes the sources of torch and of triton. This takes 1
to 3 seconds in each worker, also if the compiled code is in the cache. Workers that are forked later have the results.
"""

from __future__ import annotations

from distexp.system.torch_internals.compilation import import_compiler

import_compiler()
