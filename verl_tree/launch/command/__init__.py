"""A command line: composed, resolved, and the environment that it asks for."""
