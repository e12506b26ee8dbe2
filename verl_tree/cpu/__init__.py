"""Training and rollout without a GPU: verl's platform `cpu`, and weight updates of the vLLM CPU engine."""
