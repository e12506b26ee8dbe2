"""What tests and benchmarks need and the product never imports: drawn forests, oracles, a worker without Ray."""
