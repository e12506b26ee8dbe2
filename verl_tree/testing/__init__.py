"""Tools for tests and benchmarks: drawn forests, oracles, a worker without Ray. The product never imports them."""
