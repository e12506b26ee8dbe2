"""verl's losses on rows that are read a part at a time."""
