"""Capture of agent rollouts as token trees, and agent loops that branch. It runs inside verl's rollout processes.

`worker`    verl's agent loop worker and manager; every session is recorded and every failure is reported
`try_agent` one session of an agent loop without a training run, the command
`trial`     what that command needs: clients without a cluster, the session, its tree as text
`loops`     agent loops: `base` for loops that steer branches, loops that call tools, `blackbox` for any async function
`gateway`   a server that speaks OpenAI's and Anthropic's protocols, in front of recorded engines
`environments` what a session acts on, forked with its branches: folders, processes, objects
`capture`   recording clients, the token tree of a session, healing of drift, and the rows that the tree becomes

Each room imports only those below it, and none imports `verl_tree`.
"""
