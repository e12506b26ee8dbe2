"""What a pack costs in seconds: the model, its fit to measured packs, and the dealing of groups to ranks."""
