"""The time of a pack in seconds: the cost model, its fit to measured packs, and the dealing of groups to ranks."""
