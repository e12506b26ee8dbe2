"""Fine-tuning on trees: verl's SFT trainer on batches of whole trees.

rows ─ conversations or stored trees become tokens, read once
sampler ─ which rows are one tree, which trees are one step, and which rank computes what
trainer ─ verl's `SFTTrainer` on these batches
checks ─ what is refused before anything starts
"""
