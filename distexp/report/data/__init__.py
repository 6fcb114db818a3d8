"""Data of a report: rows of records, and what is computed from them."""
