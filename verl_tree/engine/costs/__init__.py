"""What a rank can hold, and how long its work takes."""
