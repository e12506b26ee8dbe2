"""A pretrained model from the package index, for recipes and tests on two CPU cores."""
