"""Pages of the site that are made, not written: start, commands, public names."""

from __future__ import annotations

import contextlib
import io
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the made pages to those of the folder."""
    for name, content in {
        "index.md": start(), "api.md": names(), **commands(), **notebooks()
    }.items():  # fmt: skip
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files that the site does not have become their words."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|[A-Z]+\.)[^)]*\)", r"\1", markdown)


class Examples(griffe.Extension):
    """Examples in docstrings are code, which Markdown does not see by itself."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence them."""
        if obj.docstring and ">>>" in obj.docstring.value:
            blocks = re.split(r"\n\s*\n", obj.docstring.value)
            fenced = [f"```python\n{one}\n```" if ">>>" in one else one for one in blocks]
            obj.docstring.value = "\n\n".join(fenced)


def start() -> str:
    """README, whose links start one folder higher."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def commands() -> dict[str, str]:
    """A page for every command with its help, as the terminal shows it, and one of all."""
    from locater.cli import _COMMANDS, main

    listed, pages = ["# Commands\n"], {}
    for name, (summary, example) in _COMMANDS.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main([name, "--help"])
        told = out.getvalue().partition("example:")[0].rstrip()
        listed.append(f"- [`locater {name}`](commands/{name}.md): {summary}")
        pages[f"commands/{name}.md"] = (
            f"# locater {name}\n\n{summary}\n\n```console\n$ {example}\n```\n\n"
            f"```text\n{told}\n```\n"
        )
    return {"commands.md": "\n".join(listed) + "\n", **pages}


def notebooks() -> dict[str, str]:
    """A page for every notebook, with what its cells showed."""
    pages = {}
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        parts = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            parts += [_output(one) for one in cell.get("outputs", ())]
        parts.append(f"[The notebook itself]({path.name})")
        pages[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return pages


def _output(output: Any) -> str:
    """A drawing, a table, or words."""
    shown = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/svg+xml" in shown:
        image = b64encode(shown["image/svg+xml"].encode()).decode()
        return f"![what the cell draws](data:image/svg+xml;base64,{image})"
    if "text/html" in shown:
        return "\n".join(line for line in shown["text/html"].split("\n") if line.strip())
    words = "".join(output.get("text", ())) or shown.get("text/plain", "")
    return f"```text\n{words.rstrip()}\n```"


def names() -> str:
    """Every public name, from its docstring."""
    import locater

    parts = ["# Python\n\nEverything that `from locater import …` offers.\n"]
    parts += [f"::: locater.{name}\n" for name in sorted(locater.__all__) if name[0] != "_"]
    return "\n".join(parts)
