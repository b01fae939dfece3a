"""Draws components.html: a page of each matrix's components, in one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

MOST = 2_000_000  # bytes of the page
# contexts of a component: the page takes the first of these that fits
STEPS = (8, 6, 4, 3, 2, 1)

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #666; --line: #ddd; --paper: #fff;
  --gate: 38, 110, 200; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #999; --line: #444; --paper: #181818; --gate: 90, 160, 255; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 auto; max-width: 70rem; padding: 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem .8rem; border-bottom: 1px solid var(--line);
  padding-bottom: .6rem; }
nav a { color: inherit; } nav a.here { font-weight: bold; text-decoration: none; }
section { border-bottom: 1px solid var(--line); padding: .6rem 0; display: grid;
  grid-template-columns: 15rem 1fr; gap: 1rem; }
@media (max-width: 45rem) { section { grid-template-columns: 1fr; } }
h3 { margin: 0; font-size: 1rem; } .quiet { color: var(--quiet); font-size: .85rem; }
.context { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.context b { border-bottom: 2px solid; } .context i { color: var(--quiet); font-style: normal;
  padding-right: .6em; }
table { border-collapse: collapse; font-size: .8rem; display: block; overflow-x: auto; }
td, th { padding: .1rem .35rem; text-align: center; font-weight: normal; min-width: 1.2rem; }
svg text { fill: currentColor; font-size: 11px; }
</style></head><body>
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const shade = v => `rgba(var(--gate), ${v.toFixed(3)})`;
const make = (tag, text = "", name = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (name) node.className = name;
  return node;
};
const percent = v =>
  (v >= 0.001 ? (100 * v).toPrecision(3) : (100 * v).toExponential(1)) + " %";
function drawing(width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", width); svg.setAttribute("height", height);
  return svg;
}
function shape(svg, tag, values, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
  node.textContent = text;
  svg.append(node);
}
function histogram(counts) {
  const svg = drawing(210, 46), top = Math.log1p(Math.max(...counts, 1));
  counts.forEach((count, at) => {
    const high = 40 * Math.log1p(count) / top;
    shape(svg, "rect", {x: 10 * at, y: 42 - high, width: 9, height: high, fill: shade(0.8)});
  });
  shape(svg, "line", {x1: 0, x2: 200, y1: 43, y2: 43, stroke: "currentColor"});
  return svg;
}
function context(of) {
  const line = make("div", "", "context");
  line.append(make("i", of.gate.toFixed(2)));
  of.tokens.forEach((token, at) => {
    const text = data.tokens[token].replaceAll("\\n", "↵");  // a context stays on its line
    const node = make(at === of.at ? "b" : "span", text);
    node.style.background = shade(0.0075 * of.gates[at]);
    node.title = "gate " + (of.gates[at] / 100).toFixed(2);
    line.append(node);
  });
  return line;
}
function component(of) {
  const part = make("section"), left = make("div"), right = make("div");
  left.append(make("h3", "component " + of.number));
  left.append(make("div", `needed by ${percent(of.live)} of inputs`));
  const sizes = [of.mean, of.norm].map(each => each.toPrecision(3));
  left.append(make("div", `mean gate ${sizes[0]}, norm ${sizes[1]}`, "quiet"));
  left.append(histogram(of.histogram));
  left.append(make("div", "gates from 0 to 1, logarithmic counts", "quiet"));
  if (data.kind === "token") of.contexts.forEach(each => right.append(context(each)));
  else right.append(make("div", "features: " + of.contexts.map(
    each => `${data.tokens[each.tokens[0]]} (gate ${each.gate.toFixed(2)})`).join(", ")));
  part.append(left, right);
  return part;
}
function grid(rows, columns, values, corner) {
  const table = make("table"), head = make("tr");
  head.append(make("th", corner));
  columns.forEach(name => head.append(make("th", name)));
  table.append(head);
  rows.forEach((name, at) => {
    const row = make("tr");
    row.append(make("th", name));
    values[at].forEach(value => {
      const cell = make("td", value >= 0.005 ? value.toFixed(2) : "");
      cell.style.background = shade(Math.min(1, value));
      row.append(cell);
    });
    table.append(row);
  });
  return table;
}
function arrows(of) {
  const svg = drawing(320, 320);
  const reach = Math.max(...of.weights.map(([x, y]) => Math.hypot(x, y)), 1e-12);
  const place = ([x, y], far = 1) => [160 + 115 * far * x / reach, 160 - 115 * far * y / reach];
  of.written.forEach(([x, y], at) => {
    const size = Math.hypot(x, y) / reach || 1, [right, down] = place([x / size, y / size], 1.1);
    const [beside, above] = place([x / size, y / size], 1.25);
    shape(svg, "line", {x1: 160, y1: 160, x2: right, y2: down, stroke: "#ff9f40",
      "stroke-width": 5, opacity: 0.6});
    shape(svg, "text", {x: beside, y: above + 4, "text-anchor": "middle"}, "c" + of.numbers[at]);
  });
  of.weights.forEach((weight, at) => {
    const [right, down] = place(weight), [beside, above] = place(weight, 0.75);
    shape(svg, "line", {x1: 160, y1: 160, x2: right, y2: down, stroke: shade(1),
      "stroke-width": 2});
    shape(svg, "text", {x: beside + 8, y: above - 4}, "f" + at);
  });
  return svg;
}
function show() {
  const asked = decodeURIComponent(location.hash.slice(1));
  const of = data.matrices.find(each => each.name === asked) || data.matrices[0];
  document.querySelectorAll("nav a").forEach(
    link => link.classList.toggle("here", link.textContent === of.name));
  const main = document.querySelector("main");
  main.replaceChildren(make("h2", of.name));
  main.append(make("p", of.summary, "quiet"));
  if (of.gates) {
    main.append(make("h3", "Gates by input feature and component"));
    main.append(grid(of.gates.rows, of.gates.columns, of.gates.values, "feature"));
  }
  if (of.directions) {
    main.append(make("h3", "Weights of features (f) and directions of live components (c)"));
    main.append(arrows(of.directions));
  }
  if (of.attributions) {
    main.append(make("h3", of.attributions.title));
    main.append(grid(of.attributions.rows, of.attributions.columns, of.attributions.values, ""));
  }
  of.components.forEach(each => main.append(component(each)));
}
data.matrices.forEach(each => {
  const link = make("a", each.name);
  link.href = "#" + encodeURIComponent(each.name);
  document.querySelector("nav").append(link);
});
addEventListener("hashchange", show);
show();
"""


def draw(
    title: str, kind: str, matrices: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]
) -> str:
    """Returns the page, with as many contexts and components as fit into `MOST` bytes.

    `kind` says what the inputs are: "token" or "feature". `tokens` has the text of each token or
    feature that contexts contain. Each matrix has a name, a summary, its components, and optionally
    what `show` draws above them: gates and directions of toy models, and attributions.
    """
    most = max((len(matrix["components"]) for matrix in matrices), default=0)
    sizes = [(most, contexts) for contexts in STEPS]
    while most > 1:
        most //= 2
        sizes.append((most, STEPS[-1]))
    for count, contexts in sizes:
        page = _page(title, kind, [_cut(each, count, contexts) for each in matrices], tokens)
        if len(page.encode()) <= MOST:
            break
    return page


def _cut(matrix: Mapping[str, Any], count: int, contexts: int) -> dict[str, Any]:
    """Returns a matrix with only its first components, and only their first contexts."""
    components = [
        {**each, "contexts": each["contexts"][:contexts]} for each in matrix["components"][:count]
    ]
    left = len(matrix["components"]) - len(components)
    more = f" The page has no room for {left} more, which fewer inputs need." if left else ""
    return {**matrix, "components": components, "summary": matrix["summary"] + more}


def _page(
    title: str, kind: str, matrices: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]
) -> str:
    used = sorted(
        {
            token
            for matrix in matrices
            for component in matrix["components"]
            for context in component["contexts"]
            for token in context["tokens"]
        }
    )
    place = {token: number for number, token in enumerate(used)}
    data = {
        "kind": kind,
        "tokens": [tokens[token] for token in used],
        "matrices": [_renumbered(matrix, place) for matrix in matrices],
    }
    # "<" ends no script element and begins no comment inside a JSON string
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        HEAD.replace("TITLE", escape(title))
        + f"<h1>{escape(title)}</h1>\n<nav></nav><main></main>\n"
        + f'<script type="application/json" id="data">{text}</script>\n'
        + f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _renumbered(matrix: Mapping[str, Any], place: Mapping[int, int]) -> dict[str, Any]:
    """Returns a matrix whose contexts refer to tokens by their index in the page's list."""
    return {
        **matrix,
        "components": [
            {
                **component,
                "contexts": [
                    {**context, "tokens": [place[token] for token in context["tokens"]]}
                    for context in component["contexts"]
                ],
            }
            for component in matrix["components"]
        ],
    }
