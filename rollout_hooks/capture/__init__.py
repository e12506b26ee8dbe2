"""How the LLM calls of a session become a token tree, and its leaves verl's rows."""
