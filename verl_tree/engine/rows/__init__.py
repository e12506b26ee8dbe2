"""The rows of a mini-batch: read from verl, cut into micro-batches, put back into the form that verl expects."""
