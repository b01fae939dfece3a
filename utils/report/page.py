"""One HTML file around a payload: no request leaves it, and no text in it becomes markup."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.measure.scene import plain

HERE = Path(__file__).parent
STYLES, SCRIPTS = ("report.css", "scenes.css"), ("report.js", "scenes.js")
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
<script>{script}
lockstep.start();
</script>
</body>
</html>
"""


def render(payload: Mapping[str, Any], title: str) -> str:
    return PAGE.format(
        policy=POLICY,
        title=html.escape(title),
        style=_joined(STYLES),
        payload=escape(payload),
        script=_joined(SCRIPTS),
    )


def escape(payload: Mapping[str, Any]) -> str:
    """Returns JSON that is safe within a script element, whatever texts it holds."""
    text = json.dumps(plain(payload), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((HERE / name).read_text() for name in names)
