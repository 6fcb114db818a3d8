"""Reports of finished runs: tables on the terminal, result files and a page."""
