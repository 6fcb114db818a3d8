"""``python -m distexp``, the same as ``distexp``."""

import sys

from distexp.cli.main import main

sys.exit(main())
