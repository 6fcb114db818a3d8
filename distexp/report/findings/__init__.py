"""The sentences under each figure, computed from the runs at hand, and the workshop's quiz answered by them."""
