"""``report.html``: one self-contained file that works offline."""
