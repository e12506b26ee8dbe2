"""Capture of agent rollouts as token trees, and agent loops that branch; runs inside verl's rollout processes.

`call_kinds`      how a call's prompt relates to what was recorded before it
`session_tree`    every LLM call of one session, as paths of a token tree (numpy only)
`outputs`         what a leaf is to verl: a row with its own reward
`recording`       the client that records the calls of one session
`rows`            a loop's own outputs and the recorded calls, merged into the rows of the session
`branch`          a cursor in the session's tree: generate, observe, fork, rewind, finish
`branching`       the agent loop base class whose subclasses steer branches
`parallel_tools`  the agent loop in which every tool call of a turn gets its own branch
`report`          what was captured and what was lost, counted
`worker`          verl's agent loop worker and manager with all of this in place
"""
