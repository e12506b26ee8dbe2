"""verl's trainer and training worker, subclassed, and what they do with rows."""
