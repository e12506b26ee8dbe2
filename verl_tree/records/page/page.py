"""The page around the content: template, style and script in one file.

Its security policy names style and script by their hashes, so a browser runs no other script, whoever put it there.
"""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from verl_tree.records import StoredTree
from verl_tree.records.page.content import Tokenizer, page_content

_PARTS = {"STYLE": "page.css", "SCRIPT": "page.js"}


def tree_page(tree: StoredTree, tokenizer: Tokenizer | None) -> str:
    """Make the page of a tree, a whole HTML document; without a tokenizer it shows token ids."""
    source = files("verl_tree.records.page")
    page = source.joinpath("template.html").read_text(encoding="utf-8")
    for mark, name in _PARTS.items():
        text = source.joinpath(name).read_text(encoding="utf-8")
        page = page.replace(f"/*{mark}-HASH*/", _policy_hash(text)).replace(f"/*{mark}*/", text)
    # The content comes last, so marks in what a model wrote are not replaced.
    return page.replace("/*CONTENT*/", _script_safe_json(page_content(tree, tokenizer=tokenizer)))


def _policy_hash(text: str) -> str:
    """Return what a Content-Security-Policy calls an element with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script_safe_json(content: dict[str, Any]) -> str:
    """Return JSON that cannot end or open a script element."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    # These characters occur only in strings, where they may be escaped.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
