"""Pure statistics of measured values: noise, expected improvement, and the bounds of the same training."""
