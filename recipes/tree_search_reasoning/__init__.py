"""Tree search over reasoning-gym tasks with tools, and advantages from inside the trees; no agent code of its own."""
