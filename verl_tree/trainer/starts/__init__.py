"""What a run leaves for the next start of it, and what that start takes up."""
