"""Real bugs of distributed training, rebuilt as small mutations of a strategy or of a trainer."""
