"""Makes docs/options.md from the comments in the YAML files.

    python scripts/make_options.py [--check]

Each option is documented once, by the comment above it. `--check` changes nothing and fails if the page is out of date.
"""

import re
from collections.abc import Iterator

from made_pages import ROOT, write_or_check

PAGE = ROOT / "docs" / "options.md"
SOURCES = {"configs/tree/default.yaml": "tree.", "configs/tree_ppo.yaml": "", "configs/tree_sft.yaml": ""}
NOT_OF_A_GROUP = (
    *("algorithm.adv_estimator", "algorithm.gigpo.step_advantage_w", "profile"),
    *("data.tree_key", "data.min_shared", "data.min_reward"),
)
"""What the page shows of `tree_ppo.yaml` and `tree_sft.yaml`; the rest of these is not meant to be changed."""

HEADER = """# Options

Any verl option works on the command line of `python -m verl_tree.main_ppo`; these are ours. Those of `data` are of
`python -m verl_tree.main_sft` ([fine-tuning](sft.md)). The table is made from the comments in
[`configs`](../configs) by `python scripts/make_options.py`.

| option | default | meaning |
|---|---|---|
"""


def options(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, value, comment above it) of every commented key of a YAML file, `- key: value` included."""
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        words = line.strip()
        match = re.fullmatch(r"( *)(- )?(\w+):\s*(.*)", line)
        if words.startswith("#"):
            comment.append(words.removeprefix("#").strip())
            continue
        if match:
            indent, item, name, value = len(match[1]), match[2], match[3], match[4]
            parents = [each for each in parents if each[0] < indent]
            key = name if item else ".".join([*(parent for _, parent in parents), name])
            if comment:
                yield key, value, " ".join(comment)
            if not value:
                parents.append((indent, name))
        comment = []


def page() -> str:
    """Return the page: a row for each option."""
    rows = []
    for source, prefix in SOURCES.items():
        for key, value, comment in options((ROOT / source).read_text(encoding="utf-8")):
            if prefix or key in NOT_OF_A_GROUP:
                meaning = re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", comment).replace("|", "\\|")
                rows.append(f"| `{prefix}{key}` | {f'`{value}`' if value else ''} | {meaning} |")
    return HEADER + "\n".join(rows) + "\n"


if __name__ == "__main__":
    write_or_check(PAGE, page, by="make_options.py", description=__doc__)
