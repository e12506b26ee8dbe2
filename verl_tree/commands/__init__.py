"""The command `verl-tree`: what one does before, during and after a training run."""
