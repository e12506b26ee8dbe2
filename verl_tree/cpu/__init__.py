"""Training and rollout on a machine without a GPU: verl's platform, and weight updates of the vLLM CPU engine."""
