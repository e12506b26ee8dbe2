"""Recording the LLM calls of a session as a token tree, and turning its leaves into verl's rows.

`recording`, `async_llm`        clients that record each call on its way
`session_tree`, `recorded`      the calls of one session, the paths that they make, and what is told about them
`token_trie`, `token_arrays`    the recorded paths, each token stored once
`call_kinds`                    how a call's prompt relates to what was recorded before it
`realign`, `text_compare`       healing of drift: recorded tokens in the place of others that read the same
`rows`, `outputs`               the rows of a session, and one leaf as a row with its own reward
`report`, `errors`              what was captured and what was lost, and causes in one line
"""
