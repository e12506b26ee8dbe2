"""Features of the product together, drawn at random, beside what computes the same numbers without trees.

    python -m tests.fuzz.combinations --level api --count 300
    python -m tests.fuzz.combinations --level engine --ranks 2 --count 50 --first 1000
    python -m tests.fuzz.combinations --level engine --only 17

The level `api` compares `tree_log_probs`, `score` and `score_batch` in float64 with transformers, path by path. The
level `engine` compares the tree engine in float32 with verl's own flat engine. A draw is exact, or it is refused by
name with a ValueError; anything else is printed with its settings, which `--only SEED` runs again.

`api_features.py` and `engine_features.py` are the tables of what can be drawn. What features of an engine clash is said
by `verl_tree.clashes`.
"""
