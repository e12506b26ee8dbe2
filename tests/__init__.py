"""The tests, as a package: `python -m tests.fuzz...` would find an installed package `tests` otherwise."""
