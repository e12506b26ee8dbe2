"""A pretrained model plays text games whose history is rewritten when it grows."""
