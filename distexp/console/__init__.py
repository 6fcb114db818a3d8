"""Terminal output about runs: live progress, summary panels and tables."""
