"""The predicted memory and the forecast step times of candidates."""
