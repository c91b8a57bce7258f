"""The repository's pages as a site: links that are right on the repository are made right here.

Pages in docs/ are taken as they are. Some pages lie elsewhere because people look for them there, and are taken in too.
A link to any other file of the repository has no page to lead to; its text stays.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = {"studies.md": "studies/README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site, and the files that they are on the repository."""

_PAGE_OF = {source: page for page, source in ELSEWHERE.items()} | {"README.md": "index.md"}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<heading>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config
    here = PurePosixPath(ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def led(link: re.Match[str]) -> str:
        path = os.path.normpath(here.parent / link["target"])
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says that it is broken
        place = _PAGE_OF.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return link["text"]
        return f"[{link['text']}]({place}{link['heading'] or ''})"

    return _LINK.sub(led, markdown)
