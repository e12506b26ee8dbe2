"""One tree as one self-contained HTML page: who produced which text, what it earned, where and why it forked.

    StoredTree + tokenizer ─ content ─▶ JSON ─ template.html, page.css, page.js ─▶ page

The page loads nothing (its content security policy forbids it). The script inserts text with `textContent`, so what a
model wrote is never markup. Views have addresses (docs/stored_trees.md): `page.html#search=foo`, `#leaf=0_1`.
"""

from verl_tree.records.page.content import Tokenizer
from verl_tree.records.page.page import tree_page

__all__ = ["Tokenizer", "tree_page"]
