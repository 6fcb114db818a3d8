"""Tables on a terminal of any width: ``columns`` hides or continues columns, ``text_table`` wraps words."""
