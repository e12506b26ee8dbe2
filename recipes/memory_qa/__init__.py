"""A demo of memory that learns on a CPU: what is not written down is gone before the question comes."""
