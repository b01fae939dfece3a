"""One HTML file around a payload: no request leaves it, and no text in it becomes markup."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.files import read_text

HERE = Path(__file__).parent
# Nothing is loaded from anywhere: pictures are part of the page, and so are style and script.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " base-uri 'none'; form-action 'none'"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<noscript>This page draws itself with JavaScript, which is off.</noscript>
<script type="application/json" id="payload">{payload}</script>
<script>{script}</script>
</body>
</html>
"""


def render(payload: Mapping[str, Any], title: str) -> str:
    """Returns the page as text."""
    style = "\n".join(_part(name) for name in ("report.css", "scenes.css"))
    script = "\n".join(_part(name) for name in ("report.js", "scenes.js"))
    return PAGE.format(
        policy=POLICY,
        title=html.escape(title),
        style=style,
        payload=escape(payload),
        script=script + "\nlockstep.start();\n",
    )


def shell_bytes() -> int:
    """Returns the size of a page without its payload."""
    names = ("report.css", "scenes.css", "report.js", "scenes.js")
    return len(PAGE) + sum(len(_part(name).encode()) for name in names)


def escape(payload: Mapping[str, Any]) -> str:
    """Returns JSON that is safe within a script element, whatever texts it holds."""
    text = json.dumps(_plain(payload), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    """Returns the value with types that JSON has: NaN and infinities become null, others text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _part(name: str) -> str:
    """Returns the text of a file beside this one. Those that draw scenes may be missing."""
    path = HERE / name
    return read_text(path) if path.is_file() else ""
