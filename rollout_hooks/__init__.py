"""Capture of agent rollouts as token trees, and agent loops that branch; runs inside verl's rollout processes.

`call_kinds`      how a call's prompt relates to what was recorded before it
`token_trie`      the recorded paths of a session, each token stored once
`text_compare`    whether token sequences read the same
`realign`         healing of drift: recorded tokens put in the place of others that read the same
`recorded`        what is told of a call, a path, an example of drift
`session_tree`    every LLM call of one session, as paths of a token tree (numpy only)
`outputs`         what a leaf is to verl: a row with its own reward
`recording`       the client that records the calls of one session
`async_llm`       vLLM's AsyncLLM in this process, recording the calls of one session
`gateway`         an OpenAI-compatible HTTP server in front of recorded engines
`rows`            a loop's own outputs and the recorded calls, merged into the rows of the session
`branch`          a cursor in the session's tree: generate, observe, fork, rewind, restart, add_reward, finish
                  (`branch_session` for what branches share, `branch_tokens` for what one holds)
`base`            the agent loop base class whose subclasses steer branches; misspelt options of `loops.yaml` are refused
`tool_turns`      the base class of the loops that call tools: turns, calls and results of a branch (in `turns`)
`parallel_tools`  the agent loop in which every tool call of a turn gets its own branch
`memory`          the agent loop in which every turn has a context of its own, with notes (`memory_store`)
`compaction`      the agent loop that summarises its history when a budget is reached
`subagents`       the agent loop whose turns spawn child agents
`tree_search`     the agent loop that expands places of its trees: at random, or where the model was uncertain
`blackbox`        the agent loop that runs a function against the gateway
`report`          what was captured and what was lost, counted
`worker`          verl's agent loop worker and manager with all of this in place
"""
