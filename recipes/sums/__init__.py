"""Plain samples of a pretrained model on reasoning-gym's `chain_sum`: what an ordinary user of verl trains first."""
