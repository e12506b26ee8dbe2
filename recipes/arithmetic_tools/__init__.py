"""A demo that learns on a CPU: two sums, two tools, two branches and one answer per session."""
