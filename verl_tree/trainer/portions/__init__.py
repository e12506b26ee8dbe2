"""What each rank does with its share of a step's rows, so that the driver sees no tokens."""
