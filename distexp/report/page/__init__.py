"""``report.html``: one file that holds all it shows, and asks nothing of any network."""
