"""The driver's side of a run: verl's trainer and worker, subclassed, and what they do with rows."""
