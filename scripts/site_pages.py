"""A hook of MkDocs (`mkdocs.yml`): pages that are not in docs/, and links as they stand in the repository.

`README.md` is the first page of the site. CHANGELOG.md, CONTRIBUTING.md and the recipes' READMEs are pages, too, at the
place that they have in the repository. A link is written once, relative to its file, so it holds where the repository
is shown. On the site, a link to a file of the site leads to that file. A link to any other file becomes plain text: the
site has no sources, and the repository no public address.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("recipes/*/README.md")),
]
"""Pages outside docs/, by their paths in the repository."""

LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()#\s]+)(?P<anchor>#[^()\s]*)?\)")


def site_path(path: str) -> str:
    """Return where the site has a file of the repository: ``docs/relay.md`` is ``relay.md``."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path in PAGES:
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Lead the links of a page to where the site has their targets."""
    source = page.file.abs_src_path
    assert source is not None, "every page is a file"
    folder = Path(source).parent.relative_to(ROOT).as_posix()
    here = posixpath.dirname(page.file.src_uri) or "."

    def led(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        if not (ROOT / path).exists():  # a link to elsewhere; what is broken is for MkDocs to say
            return link[0]
        target = site_path(path)
        if files.get_file_from_path(target) is None:
            return link["text"]
        return f"[{link['text']}]({posixpath.relpath(target, here)}{link['anchor'] or ''})"

    return LINK.sub(led, markdown)
