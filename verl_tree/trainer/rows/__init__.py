"""The rows of a step: read, checked, padded, numbered, and stored for later steps."""
