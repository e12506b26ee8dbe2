"""The everyday tree: a tool loop whose chat template drops the thinking of earlier turns."""
