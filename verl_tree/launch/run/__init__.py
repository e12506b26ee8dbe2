"""A run from outside: its console, its processes and how it ends."""
