"""Search for the fastest configuration of a training: ``distexp choose``. No module trains, or imports torch."""
