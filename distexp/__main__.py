"""``python -m distexp``."""

import sys

from distexp.cli.main import main

sys.exit(main())
