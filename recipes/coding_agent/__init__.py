"""Recipe: mini-swe-agent, unchanged, learns to repair bugs of one line in throw-away folders."""
