"""``python -m distexp``."""

import sys

from distexp.cli import main

sys.exit(main())
