"""An agent written with the public `openai` client, which knows nothing of verl, trained through the gateway."""
