"""A kernel whose logits are 2 % too large; verl imports this module with a model (`model.external_lib`)."""

import numpy as np

from verl_tree.attention import hf
from verl_tree.testing.mutants import scales_wrongly

hf.layer_attention = scales_wrongly(hf.layer_attention, np.random.default_rng(0))
