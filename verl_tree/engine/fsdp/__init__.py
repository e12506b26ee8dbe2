"""verl's FSDP2 engine: on trees, and on flat rows without a GPU."""
