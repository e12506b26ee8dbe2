"""Makes the table of clashes in docs/from_verl.md from `verl_tree.clashes`.

    python scripts/make_clashes.py [--check]

`--check` changes nothing and fails if the page is out of date.
"""

import re

from made_pages import ROOT, with_part, write_or_check

from verl_tree.clashes import CLASHES

PAGE = ROOT / "docs" / "from_verl.md"


def shown(name: str) -> str:
    """Return the name of a feature as the page shows it: settings are code."""
    return re.sub(r"[\w.]+(!?=[\w,]+)|\w+[._][\w.]+", lambda match: f"`{match[0].replace(',', ', ')}`", name)


def page() -> str:
    """Return the page with the table: a line for each clash."""
    rows = [
        f"| {shown(clash.feature)} | {' and '.join(map(shown, clash.others))} | {clash.why} | {clash.remedy} |\n"
        for clash in CLASHES
    ]
    table = "| setting | with | why | what to do |\n|---|---|---|---|\n" + "".join(rows)
    return with_part(PAGE, table, by="make_clashes.py")


if __name__ == "__main__":
    write_or_check(PAGE, page, by="make_clashes.py", description=__doc__)
