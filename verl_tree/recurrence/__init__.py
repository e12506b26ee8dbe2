"""Layers that carry a state from token to token, such as Gated DeltaNet, on trees (docs/recurrence.md)."""
