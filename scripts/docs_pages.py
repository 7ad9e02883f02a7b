"""Pages of the documentation that are made from other files: a hook of MkDocs (``mkdocs.yml``).

The start page is the README; benchmarks, security, contributing and changes are files of the project; the gallery and
the reference are made from docstrings, and a page of every notebook from its cells and their outputs. Links between
these files are rewritten to the pages.
"""

import json
import posixpath
import re
import sys
from ast import get_docstring, parse
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))  # MkDocs loads a hook by its file

import equations  # noqa: E402

TAKEN = {  # file of the project -> page
    "README.md": "index.md", "bench/README.md": "bench.md", "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
}  # fmt: skip
LINK = re.compile(r"(?P<shown>!?\[[^\]]*\])\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
FETCHED = re.compile(r"""<(?:script|img|iframe|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)\"""")
LOG = get_plugin_logger("docs_pages")
GROUPS = {  # of the reference: title -> modules of the public names
    "Train and evaluate": ("study", "evaluation", "assessment", "ensembles", "export", "prediction", "report"),
    "A study": ("config", "engines", "training", "privacy"),
    "Data": ("data", "planning"),
    "Networks and encoders": ("models", "heterogeneity"),
    "Costs and measures": ("costs", "metrics"),
    "Algorithms": ("algorithms",),
}
OTHER = "Other names"
NOTEBOOKS = ROOT / "docs/notebooks"
LONGEST = 30  # lines of an output
WHOLE = ("Run", "Study")  # whose methods are part of the reference


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of ``docs/``."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in TAKEN.items()}
    made |= {"gallery.md": gallery(), "reference.md": reference()}
    made |= {f"notebooks/{book.stem}.md": notebook(book) for book in sorted(NOTEBOOKS.glob("*.ipynb"))}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to the pages: those of files outside ``docs/``, and of their own links into it."""
    source = next((s for s, p in TAKEN.items() if p == page.file.src_uri), f"docs/{page.file.src_uri}")

    def point(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        place = TAKEN.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if posixpath.dirname(target) == "docs/notebooks" and not page.file.src_uri.startswith("notebooks/"):
            place = place.replace(".ipynb", ".md")
        if target == "docs/results":
            place = "results/hospitals.md"
        if not place and (ROOT / target).exists():
            return link["shown"][1:-1]  # a file that is no page, such as a module
        if not place or files.get_file_from_path(place) is None:
            return link[0]  # MkDocs warns, which is an error
        there = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['shown']}({there}{link['anchor'] or ''})"

    return LINK.sub(point, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn, which is an error, of a page that fetches something from elsewhere when it is read."""
    for fetched in FETCHED.findall(output):
        LOG.warning("%s fetches %s when it is read", page.file.src_uri, fetched)
    return output


def on_post_build(config: Any) -> None:
    """Write the search index as a script, too: a page that was opened as a file asks for it, for no use."""
    index = Path(config["site_dir"]) / "search/search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its text, its code, and what the code printed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text, parts = "".join(cells[0]["source"]), []
    title, _, rest = text.partition("\n")
    parts += [title, f"This page is a notebook: [{path.name}]({path.name}) opens in Jupyter.", rest]
    for cell in cells[1:]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown = "".join(_printed(output) for output in cell.get("outputs", ())).rstrip()
        lines = shown.splitlines()
        if lines:
            parts.append("\n".join(["```text", *lines[:LONGEST], *["…"][: len(lines) > LONGEST], "```"]))
    return "\n\n".join(parts) + "\n"


def _printed(output: dict[str, Any]) -> str:
    """Return the text of an output of a cell."""
    text = output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", "")
    return "".join(text)


def gallery() -> str:
    """Return a section for every algorithm: what it does, its paper, its equation and its settings."""
    from polysite.algorithms import ALGORITHMS

    lines = ["# Gallery of algorithms", "", "One section per algorithm: its equation, its paper, its settings.", ""]
    for name, place in ALGORITHMS.items():
        module, kind = place.split(":")
        path = ROOT / "src/polysite/algorithms" / f"{module}.py"
        words = get_docstring(parse(path.read_text(encoding="utf-8"))) or ""
        lines += [f"## {name}", "", _plain(words), ""]
        if not kind.isupper():
            options = "    options: {heading_level: 3, show_root_heading: false, show_root_toc_entry: false}"
            lines += [f"::: polysite.algorithms.{module}.{kind}", options, ""]
    return "\n".join(lines)


def reference() -> str:
    """Return the public names of polysite, by subject."""
    import polysite

    homes: dict[str, list[str]] = {title: [] for title in (*GROUPS, OTHER)}
    for name in polysite.__all__:
        home = polysite._HOME[name]
        subject = home.split(".")[1]
        title = next((t for t, parts in GROUPS.items() if subject in parts), OTHER)
        members = "\n    options: {members: true, filters: ['!^_']}" if name in WHOLE else ""
        homes[title].append(f"::: {home}.{name}{members}")
    parts = [f"## {title}\n\n" + "\n\n".join(names) for title, names in homes.items() if names]
    return "# Python reference\n\n`import polysite as ps` gives every name below.\n\n" + "\n\n".join(parts) + "\n"


def _plain(words: str) -> str:
    """Return a docstring as Markdown: indented lines, the equations, are typeset; double backquotes are single."""
    return re.sub(r"``([^`]*)``", r"`\1`", equations.blocks(words))
