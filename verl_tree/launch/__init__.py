"""What happens before and around a training run: composing and checking its configuration, watching its processes."""
