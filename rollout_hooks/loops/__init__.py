"""Agent loops that branch, and the cursor that they steer."""
