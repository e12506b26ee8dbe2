"""Recording of a session's LLM calls as a token tree, and the rows that its leaves become.

`recording`, `async_llm`        clients that record each call
`session_tree`, `recorded`      the calls of one session, their paths, and records about them
`token_trie`, `token_arrays`    the recorded paths, each token stored once
`call_kinds`                    how a call's prompt relates to what was recorded before it
`realign`, `text_compare`       healing of drift
`rows`, `outputs`, `roles`      the rows of a session; one leaf as a row with its own reward; what a leaf was for
`report`, `errors`              counts of what was captured and what was lost; causes in one line
`tracebacks`                    where in the user's code an error came from
"""
