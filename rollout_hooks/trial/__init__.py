"""One session of an agent loop without a training run; the command is `rollout_hooks.try_agent`.

`session`     the session, run as verl's worker runs it, and its row of the data
`deadline`    the end of a session that does not end
`clients`     answers from a file, or of a server
`tree_text`   the rows of a session as a tree of text
"""
