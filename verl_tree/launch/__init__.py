"""What happens before and around a run: composing and checking its configuration, watching its processes."""
