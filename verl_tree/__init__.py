"""verl_tree: branching agent rollouts trained as token trees, every shared prefix computed once.

The modules form one line and import only backwards along it: `tree` and `packing` (numpy), `layout`,
`attention`, `logprobs` and `functional` (torch), then the engine and the trainer (verl). Importing the
package itself imports none of them.
"""

__version__ = "0.1.0"
