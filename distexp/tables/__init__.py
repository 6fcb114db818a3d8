"""Tables on a terminal, and the consoles that show them."""
