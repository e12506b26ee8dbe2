"""Capture of agent rollouts as token trees, and agent loops that branch; runs inside verl's rollout processes.

`worker`    verl's agent loop worker and manager, with every session recorded and no failure lost
`loops`     agent loops: `base` for loops that steer branches (`branch`), loops that call tools, and `blackbox`, which
            runs any async function against the gateway
`gateway`   an OpenAI-compatible HTTP server in front of recorded engines
`capture`   the recording clients, the token tree of a session (`session_tree`), healing of drift (`realign`), and the
            rows that the tree becomes (`rows`)

Each imports only those below it, and none imports `verl_tree`.
"""
