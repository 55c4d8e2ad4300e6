"""Self-contained HTML page of explanations: the components of the studio in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from transduce.explain.attention import Explanation
from transduce.explain.records import page_record
from transduce.storage import replace_file

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript><p>The script in this page draws its maps: it needs JavaScript, but no network.</p></noscript>
<script type="application/json" id="page">{content}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def write_page(explanations: Sequence[Explanation], path: str | Path, title: str = "Attention") -> None:
    """Writes the page to a file."""
    replace_file(path, render_page(explanations, title))


def render_page(explanations: Sequence[Explanation], title: str = "Attention") -> str:
    """The page as text."""
    return offline_page(title, page_record(explanations, title))


def offline_page(title: str, content: Mapping[str, Any]) -> str:
    """A page of the studio with its content. Its security policy allows its own script and style, and no requests."""
    folder = files("transduce.studio") / "static"
    script = (folder / "studio.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    style = (folder / "studio.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; img-src data: blob:; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}"
    return TEMPLATE.format(
        policy=policy + "; base-uri 'none'",
        title=html.escape(title),
        style=style,
        script=script,
        content=json_for_script(content),
    )


def notebook_frame(explanation: Explanation, height: int = 720) -> str:
    """The page in a frame of its own, so that its script and style do not meet those of the notebook."""
    page = html.escape(render_page([explanation], explanation.source))
    frame = f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0"></iframe>'
    return f"{frame}<p>{html.escape(explanation.verdict)}</p>" if explanation.attributions else frame


def displayed(shown: Any) -> bool:
    """Displays an object with `_repr_html_` in the output of a notebook cell; False: this is no notebook."""
    notebook = sys.modules.get("IPython")  # imported by the kernel of a notebook, and never by us
    if notebook is None or notebook.get_ipython() is None:
        return False
    notebook.display.display(shown)
    return True


def json_for_script(content: Any) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or start another.

    U+2028 and U+2029 end a line in older JavaScript; escaped, they are harmless everywhere.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate, from damaged text, cannot be encoded as UTF-8 but can be escaped.
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
