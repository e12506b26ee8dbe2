"""What the recipes share: the small model, how it is made, and a task of two sums with two tools."""
