"""The work around a training run: composing and checking its configuration, and watching its processes."""
