"""Model architectures, their losses, and the inspection and export of models."""
