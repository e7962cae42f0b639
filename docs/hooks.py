"""Hooks of mkdocs: gives the site the folders of the repository.

mkdocs reads one folder of pages. Here pages also link to the README, to benchmarks and to source
files, so all of these are put into the site under the paths they have in the repository, source
files as they are.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/README.md", "benchmarks/results/*.md")
FILES = ("docs/site.css", "docs/**/*.svg", "docs/**/*.png", "benchmarks/results/*.svg")
LINK = re.compile(r"\]\(([^)#\s]+)")
# What a page loads when it is read.
LOADED = re.compile(
    r'<(?:script|img|iframe)\b[^>]*\bsrc="(?!data:)([^"]+)"'
    r'|<link\b[^>]*stylesheet"[^>]*\bhref="([^"]+)"'
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the pages of a folder where the navigation names the folder."""
    config.nav = _with_folders(config.nav or [])
    return config


def _with_folders(entry):
    if isinstance(entry, list):
        return [_with_folders(part) for part in entry]
    if isinstance(entry, dict):
        return {name: _with_folders(part) for name, part in entry.items()}
    if entry.endswith("/"):
        return sorted(f"{entry}{path.name}" for path in (ROOT / entry).glob("*.md"))
    return entry


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those of the repository, under their paths there."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for pattern in PAGES + FILES for path in ROOT.glob(pattern)}):
        _add(files, path.relative_to(ROOT).as_posix(), config)
    for page in list(files.documentation_pages()):
        for target in _linked(page):
            if (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                _add(files, target, config)
    return files


def _add(files: Files, uri: str, config: MkDocsConfig) -> None:
    files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))


def _linked(page: File) -> list[str]:
    """Returns the paths in the repository that a page links to."""
    folder = posixpath.dirname(page.src_uri)
    found = LINK.findall(page.content_string)
    return [posixpath.normpath(posixpath.join(folder, link)) for link in found if ":" not in link]


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuses a page whose styles or scripts are missing, or would come from another host."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its paths are those of a site at the root of its host
            continue
        for tag in LOADED.finditer(page.read_text()):
            named = tag[1] or tag[2]
            target = named.partition("?")[0].partition("#")[0]
            if ":" in target or target.startswith("//") or not (page.parent / target).exists():
                raise PluginError(f"{page.relative_to(site)} loads {named}, which is not there")
