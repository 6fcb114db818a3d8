"""Data model of a report: records, their settings and metrics, and what is computed from them."""
