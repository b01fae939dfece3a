"use strict";
// Draws the model at work. A scene is a JSON object that an evaluation has left; the function of
// its `kind` returns an element. Text from data becomes text nodes.
(() => {
  const { el, svg, format, percent, plural, ticks, responsive, chart, scenes, STEPS } = lockstep;
  const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const levels = (text) => [...text].map((letter) => LEVELS.indexOf(letter) / 63);
  // names of colours in scenes; anything else is not let into a style
  const colour = (name) =>
    /^(good|bad|accent|muted|changed|clue|c[1-8])$/.test(name) ? `var(--${name})` : "var(--c1)";
  const verdict = (isRight) => (isRight ? "good-text" : "bad-text");

  // ---- boards

  // Path data for cells of a grid of unit squares: `shape` gets the corner of each.
  const path = (cells, side, shape) =>
    cells.map((cell) => shape(cell % side, Math.floor(cell / side))).join("");
  const square = (inset) => (x, y) => {
    const size = 1 - 2 * inset;
    return `M${x + inset} ${y + inset}h${size}v${size}h${-size}z`;
  };
  const disc = (radius) => (x, y) => {
    const arc = `a${radius} ${radius} 0 1 0`;
    return `M${x + 0.5 - radius} ${y + 0.5}${arc} ${2 * radius} 0${arc} ${-2 * radius} 0z`;
  };
  const stroke = (x, y) => `M${x + 0.2} ${y + 0.84}l.6 -.68`;
  const shape = (name, d) => svg("path", { class: name, d });
  const letters = (name, cells, side, text) =>
    cells.map((cell) =>
      svg(
        "text",
        { class: name, x: (cell % side) + 0.5, y: Math.floor(cell / side) + 0.72 },
        text(cell),
      ),
    );

  // The answers by step as strings; a step may be stored as the cells that changed.
  function answersOf(example) {
    const found = [];
    for (const step of example.answers) {
      if (typeof step === "string") {
        found.push(step);
        continue;
      }
      const cells = [...found.at(-1)];
      for (const [cell, letter] of Object.entries(step)) cells[Number(cell)] = letter;
      found.push(cells.join(""));
    }
    return found;
  }

  const NO_CELLS = { clue: [], right: [], wrong: [], missing: [], unknown: [], changed: [] };

  // Sorts cells at a place of the slider: 0 is the puzzle as given, n the n-th answer.
  function cellsAt(scene, example, answers, place) {
    const isMaze = scene.board === "maze";
    const isGrid = scene.board === "grid"; // whose answer may be another grid than the input
    const { inputs, labels } = example;
    const shown = place ? answers[place - 1] : inputs;
    const before = place > 1 ? answers[place - 2] : shown;
    const cells = { ...structuredClone(NO_CELLS), shown, given: inputs, fixed: 0, broken: 0 };
    [...shown].forEach((said, cell) => {
      const isGiven = !isGrid && inputs[cell] !== (isMaze ? " " : ".");
      const isRight = said === labels[cell];
      if (before[cell] !== said) {
        cells.changed.push(cell);
        if (isRight) cells.fixed++;
        else if (before[cell] === labels[cell]) cells.broken++;
      }
      if (isGiven && said === inputs[cell]) cells.clue.push(cell);
      else if (!place) return;
      else if (labels[cell] === "-") cells.unknown.push(cell);
      else if (isRight) cells.right.push(cell);
      else if (isMaze && labels[cell] === "o" && said === " ") cells.missing.push(cell);
      else cells.wrong.push(cell);
    });
    return cells;
  }

  function drawSudoku({ side, box }, cells) {
    const [tall, wide] = box || [side, side];
    const lines = { thin: "", thick: "" };
    for (let at = 0; at <= side; at++) {
      lines[at % tall === 0 || at === side ? "thick" : "thin"] += `M0 ${at}h${side}`;
      lines[at % wide === 0 || at === side ? "thick" : "thin"] += `M${at} 0v${side}`;
    }
    const digits = ["clue", "right", "wrong", "unknown"].map((sort) =>
      letters(
        `digit ${sort}`,
        cells[sort].filter((cell) => cells.shown[cell] !== "."),
        side,
        (cell) => cells.shown[cell],
      ),
    );
    return svg(
      "g",
      { class: "sudoku" },
      shape("paper", `M0 0h${side}v${side}h${-side}z`),
      shape("fill-clue", path(cells.clue, side, square(0))),
      shape("fill-right", path(cells.right, side, square(0.18))),
      shape("fill-wrong", path(cells.wrong, side, square(0))),
      shape("thin", lines.thin),
      shape("thick", lines.thick),
      digits,
      shape("mark-wrong", path(cells.wrong, side, stroke)),
      shape("mark-changed", path(cells.changed, side, square(0.07))),
    );
  }

  function drawMaze({ side }, cells) {
    const where = (letter) =>
      [...cells.given].flatMap((each, cell) => (each === letter ? [cell] : []));
    const isPath = (cell) => cells.shown[cell] === "o";
    const ends = [...where("S"), ...where("G")];
    return svg(
      "g",
      { class: "maze" },
      shape("paper", `M0 0h${side}v${side}h${-side}z`),
      shape("wall", path(where("#"), side, square(-0.01))),
      shape("path-right", path(cells.right.filter(isPath), side, disc(0.3))),
      shape("path-unknown", path(cells.unknown.filter(isPath), side, disc(0.3))),
      shape("path-missing", path(cells.missing, side, disc(0.26))),
      shape("end", path(ends, side, square(0))),
      letters("letter", ends, side, (cell) => cells.given[cell]),
      shape("fill-wrong", path(cells.wrong, side, square(0))),
      shape("mark-wrong", path(cells.wrong, side, stroke)),
      shape("mark-changed", path(cells.changed, side, square(0.06))),
    );
  }

  function drawGrid({ side }, cells) {
    const shown = [...cells.shown].map((symbol, cell) => ({
      symbol,
      x: cell % side,
      y: Math.floor(cell / side),
    }));
    const wrong = path(cells.wrong, side, stroke);
    return svg(
      "g",
      { class: "grid" },
      coloured(shown.filter(({ symbol }) => !" .".includes(symbol))),
      shape("halo", wrong),
      shape("mark-wrong", wrong),
      shape("mark-changed", path(cells.changed, side, square(0.07))),
    );
  }

  const drawings = { sudoku: drawSudoku, maze: drawMaze, grid: drawGrid };

  function drawBoard(scene, cells, attributes) {
    const board = drawings[scene.board](scene, cells);
    const [wide, tall] = [scene.side + 0.12, (scene.rows || scene.side) + 0.12];
    return svg("svg", { viewBox: `-0.06 -0.06 ${wide} ${tall}`, ...attributes }, board);
  }

  const LEGENDS = {
    sudoku: [
      ["clue", "7", "clue"],
      ["right", "7", "right"],
    ],
    maze: [
      ["clue", "#", "wall"],
      ["right", "o", "path, right"],
      ["missing", " ", "path, missing"],
    ],
    grid: [],
  };

  function legendOf({ board }) {
    const known = LEGENDS[board];
    const wrong = [board === "maze" ? "o" : "7", "wrong (struck through)"];
    const all = [...known, ["wrong", ...wrong], ["changed", ".", "changed in this step"]];
    const keys = all.map(([sort, shown, text]) => {
      const cells = { ...NO_CELLS, [sort]: [0], shown, given: shown };
      const small = { board, side: 1, box: [1, 1] };
      return el(
        "span",
        {},
        drawBoard(small, cells, { class: "board-key", "aria-hidden": "true" }),
        text,
      );
    });
    return el("div", { class: "legend" }, keys);
  }

  scenes.boards = (scene) => {
    const last = scene.steps.length;
    const board = el("div", { class: "board" });
    const facts = el("dl", { class: "board-facts" });
    const halting = el("div", {});
    const name = el("output", { class: "step-name" });
    const slider = el("input", {
      type: "range",
      min: 0,
      max: last,
      value: 1,
      "aria-label": "Thinking step",
      oninput: () => show(Number(slider.value), pause()),
    });
    const play = el("button", {
      type: "button",
      class: "play",
      onclick: () => (timer ? pause() : start()),
    });
    let [example, answers, place, timer] = [null, [], 1, null];

    function pause() {
      clearInterval(timer);
      timer = null;
      play.textContent = "▶ Play";
    }
    function start() {
      if (place >= last) show(0);
      play.textContent = "❚❚ Pause";
      timer = setInterval(
        () => {
          if (board.isConnected && place < last) show(place + 1);
          if (!board.isConnected || place >= last) pause();
        },
        last > 20 ? 350 : 650,
      );
    }
    function show(next) {
      place = next;
      const cells = cellsAt(scene, example, answers, place);
      const title = place
        ? `Step ${scene.steps[place - 1]} of ${scene.steps[last - 1]}`
        : "The puzzle as given";
      const counted = [...example.labels].filter((letter) => letter !== "-").length;
      const right = counted - cells.wrong.length - cells.missing.length;
      const told = place && counted ? `${format(right)} of ${format(counted)}` : "–";
      const label = `${title}, ${told} cells right, ${plural(cells.changed.length, "cell")} changed`;
      board.replaceChildren(drawBoard(scene, cells, { role: "img", "aria-label": label }));
      slider.value = place;
      slider.setAttribute("aria-valuetext", `${title}, ${told} cells right`);
      name.textContent = title;
      const changes = (count, sort) =>
        el("dd", { class: count ? sort : null }, place > 1 ? format(count) : "–");
      const fact = (text, value) => [
        el("dt", {}, text),
        value instanceof Node ? value : el("dd", {}, value),
      ];
      facts.replaceChildren(
        ...fact("right", told),
        ...fact("fixed in this step", changes(cells.fixed, "good-text")),
        ...fact("broken in this step", changes(cells.broken, "bad-text")),
        ...fact("halting value", place ? percent(example.halting[place - 1]) : "–"),
        ...fact("halts at", example.halt_step ? `step ${example.halt_step}` : "no step"),
      );
    }
    function choose(index) {
      pause();
      example = scene.examples[index];
      answers = answersOf(example);
      thumbs.forEach((thumb, i) => thumb.setAttribute("aria-pressed", String(i === index)));
      const curve = {
        name: "halting value",
        color: "var(--c1)",
        dots: true,
        x: scene.steps,
        y: example.halting,
      };
      const options = {
        title: "halting value by step",
        series: [curve],
        unit: "%",
        least: 0,
        most: 1,
      };
      const drawn = chart(() => ({ ...options, whole: true, height: 130, xLabel: "step" }));
      halting.replaceChildren(el("p", { class: "over" }, "Halting value by step"), drawn);
      show(Math.min(Math.max(place, 1), last));
    }
    const thumbs = scene.examples.map((each, index) => {
      const cells = cellsAt(scene, each, answersOf(each), last);
      const said = each.solved ? "solved" : "not solved";
      return el(
        "button",
        {
          type: "button",
          class: "thumb",
          "aria-label": `Example ${each.index}, ${said}`,
          onclick: () => choose(index),
        },
        drawBoard(scene, cells, { "aria-hidden": "true" }),
        el(
          "span",
          {},
          el("b", { class: verdict(each.solved) }, each.solved ? "✓ " : "✗ "),
          each.index,
        ),
      );
    });
    choose(0);
    const controls = last > 1 && el("div", { class: "controls" }, play, slider, name);
    const beside = el("div", {}, facts, last > 1 && halting, legendOf(scene));
    return el(
      "div",
      {},
      thumbs.length > 1 &&
        el("div", { class: "thumbs", role: "group", "aria-label": "Examples" }, thumbs),
      el("div", { class: "board-layout" }, el("div", {}, board, controls), beside),
    );
  };

  // ---- lines and bars

  scenes.lines = (scene) => {
    const { x, y, title } = scene;
    const series = scene.lines.map(({ name, values, colour: color }, i) => ({
      key: `${title} ${name}`,
      name,
      color: colour(color),
      dashed: i % 2 === 1,
      dots: x.values.length <= 40,
      x: x.values,
      y: values,
    }));
    const whole = x.values.every(Number.isInteger);
    const axes = { least: y.min, most: y.max, unit: y.percent ? "%" : "", whole, xLabel: x.label };
    return chart(() => ({ title, series, height: 240, ...axes }));
  };

  // Stacked columns; with `diverging` the second series goes down.
  scenes.bars = ({ x, y, title, series, diverging }) => {
    const indices = [...x.values.keys()];
    const tops = indices.map(() => 0);
    const columns = series.map((one, s) => {
      const values = indices.map((i) => one.values[i] || 0);
      const isDown = diverging && s > 0;
      const base = isDown ? indices.map(() => 0) : [...tops];
      const places = indices.map((i) => i + 1);
      const ends = values.map((value, i) => (isDown ? -value : (tops[i] += value)));
      const color = colour(one.colour);
      return {
        key: `${title} ${one.name}`,
        name: one.name,
        color,
        dashed: s % 2 === 1,
        x: places,
        y: ends,
        base,
        values,
      };
    });
    const every = Math.ceil(indices.length / 12);
    const xTicks = indices.filter((i) => i % every === 0).map((i) => i + 1);
    const xText = (place) => String(x.values[place - 1]);
    const room = 0.5 / Math.max(1, indices.length - 1);
    const axes = { xTicks, xText, xLabel: x.label, room, unit: y.percent ? "%" : "", diverging };
    if (!diverging) axes.least = 0;
    const drawn = chart(() => ({ title, series: columns, height: 220, ...axes }));
    return el("div", {}, y.label && el("p", { class: "over" }, y.label), drawn);
  };

  // ---- matrices

  scenes.matrix = (scene) =>
    el(
      "div",
      { class: "matrices" },
      scene.panels.map((panel) => matrix(scene, panel)),
    );

  function matrix(scene, panel) {
    const hasCounts = Boolean(panel.values);
    const values = panel.values || panel.levels.map(levels);
    const most = hasCounts ? Math.max(0, ...values.flat().map(Math.abs)) || 1 : 1;
    const sums = values.map((row) => row.reduce((sum, value) => sum + Math.abs(value || 0), 0));
    const share = (r, c) => Math.abs(values[r][c] || 0) / (scene.shares ? sums[r] || 1 : most);
    const hint = "Point at a cell, or use the arrow keys, for its value.";
    const readout = el("p", { class: "over", role: "status" }, hint);
    const say = (r, c) => {
      const where = `${scene.row_label} ${panel.rows[r]}, ${scene.column_label} ${panel.columns[c]}`;
      const of = scene.shares ? ` of ${format(sums[r])} (${percent(share(r, c))})` : "";
      const value = hasCounts ? format(values[r][c]) : format(Math.round(100 * values[r][c]) / 100);
      readout.replaceChildren(el("b", {}, where), `: ${value}${of}`);
    };
    const draw = (width) => drawMatrix(scene, panel, width, share, hasCounts && values, say);
    const [holder] = responsive(draw);
    const end = scene.shares ? `100 % of the ${scene.row_label}` : format(most);
    const bar = el("div", { class: "colour-bar" }, scene.shares ? "0 %" : "0", el("i", {}), end);
    return el("figure", {}, panel.name && el("figcaption", {}, panel.name), holder, bar, readout);
  }

  function drawMatrix(scene, { name, rows, columns }, room, share, numbers, say) {
    const left = 30 + 7 * Math.max(...rows.map((each) => String(each).length));
    const top = 20;
    const wide = Math.max(1.5, Math.min(34, (room - left - 4) / columns.length));
    const tall = Math.min(wide, Math.max(6, 420 / rows.length));
    const [right, bottom] = [left + wide * columns.length, top + tall * rows.length];
    const [width, height] = [right + 4, bottom + 24];
    const root = svg("svg", {
      class: "matrix",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": `${name || scene.title}: ${scene.row_label} by ${scene.column_label}`,
    });
    const text = (x, y, anchor, content, attributes) =>
      root.append(svg("text", { x, y, "text-anchor": anchor, ...attributes }, content));
    root.append(
      svg("rect", { class: "paper", x: left, y: top, width: right - left, height: bottom - top }),
    );
    const byLevel = {};
    rows.forEach((_, r) =>
      columns.forEach((_, c) => {
        const level = Math.round(40 * Math.min(1, share(r, c)));
        const [x, y] = [left + c * wide, top + r * tall];
        if (level) byLevel[level] = `${byLevel[level] || ""}M${x} ${y}h${wide}v${tall}h${-wide}z`;
      }),
    );
    for (const [level, d] of Object.entries(byLevel))
      root.append(svg("path", { class: "matrix-fill", d, "fill-opacity": level / 40 }));
    const centre = (r, c) => [left + (c + 0.5) * wide, top + (r + 0.5) * tall + 4];
    if (numbers && wide >= 18)
      rows.forEach((_, r) =>
        columns.forEach((_, c) => {
          const onDark = share(r, c) > 0.5 ? "on-dark" : "on-light";
          if (numbers[r][c])
            text(...centre(r, c), "middle", format(numbers[r][c]), { class: onDark });
        }),
      );
    const widest = 7 * Math.max(...columns.map((each) => String(each).length)) + 5;
    for (const r of ticks(0, rows.length - 0.5, (tall * rows.length) / 13, { whole: true }))
      text(left - 6, centre(r, 0)[1], "end", rows[r]);
    for (const c of ticks(0, columns.length - 0.5, (wide * columns.length) / widest, {
      whole: true,
    }))
      text(centre(0, c)[0], top - 6, "middle", columns[c]);
    text(right, height - 7, "end", `${scene.column_label} →`);
    const turned = `translate(11 ${(top + bottom) / 2}) rotate(-90)`;
    text(0, 0, "middle", scene.row_label, { transform: turned });

    const cursor = svg("rect", {
      class: "cursor",
      width: wide,
      height: tall,
      visibility: "hidden",
    });
    root.append(cursor);
    let at = [0, -1];
    const show = (r, c) => {
      at = [
        Math.max(0, Math.min(rows.length - 1, r)),
        Math.max(0, Math.min(columns.length - 1, c)),
      ];
      cursor.setAttribute("x", left + at[1] * wide);
      cursor.setAttribute("y", top + at[0] * tall);
      cursor.setAttribute("visibility", "visible");
      say(...at);
    };
    root.addEventListener("pointermove", (event) => {
      const frame = root.getBoundingClientRect();
      const c = Math.floor(((event.clientX - frame.left) * (width / frame.width) - left) / wide);
      const r = Math.floor(((event.clientY - frame.top) * (height / frame.height) - top) / tall);
      if (r >= 0 && c >= 0 && r < rows.length && c < columns.length) show(r, c);
    });
    root.addEventListener("keydown", (event) => {
      const step = event.key.startsWith("Arrow") && STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      const isVertical = event.key === "ArrowUp" || event.key === "ArrowDown";
      show(at[0] + (isVertical ? step : 0), at[1] + (isVertical ? 0 : step));
    });
    return root;
  }

  // ---- pictures, ARC, text

  scenes.images = ({ items, width, height }) => {
    const figures = items.map(({ index, truth, answer, share, pixels }) => {
      const label = `image ${index}: a ${truth}, taken for ${answer}`;
      const canvas = el("canvas", { width, height, role: "img", "aria-label": label });
      const context = canvas.getContext("2d");
      const image = context.createImageData(width, height);
      levels(pixels).forEach((value, i) =>
        image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i),
      );
      context.putImageData(image, 0, 0);
      const said = [el("b", { class: "bad-text" }, answer), " instead of ", el("b", {}, truth)];
      const note = el("span", {}, `sure ${percent(share)}`);
      return el("figure", {}, canvas, el("figcaption", {}, el("span", {}, said), note));
    });
    return el("div", { class: "images" }, figures);
  };

  const PALETTE = [
    "#000000",
    "#0074d9",
    "#ff4136",
    "#2ecc40",
    "#ffdc00",
    "#aaaaaa",
    "#f012be",
    "#ff851b",
    "#7fdbff",
    "#870c25",
  ];
  const LIGHT = new Set("34578");

  // Symbols in ARC's colours; those of further symbols are spread around the circle.
  const fillOf = (symbol) =>
    PALETTE[Number(symbol)] || `hsl(${(symbol.codePointAt(0) * 137.5) % 360} 50% 45%)`;
  function coloured(cells) {
    const squares = cells.map(({ symbol, x, y }) =>
      svg("rect", { x, y, width: 1, height: 1, fill: fillOf(symbol) }),
    );
    const symbols = cells.map(({ symbol, x, y }) => {
      const fill = LIGHT.has(symbol) ? "#000000" : "#ffffff";
      return svg("text", { x: x + 0.5, y: y + 0.75, fill }, symbol);
    });
    return [...squares, ...symbols];
  }

  function arcGrid(rows, label) {
    const [tall, wide] = [rows.length, rows.length ? rows[0].length : 0];
    if (!tall || !wide) return el("div", { class: "empty" }, "no grid");
    const cells = rows.flatMap((row, y) => [...row].map((symbol, x) => ({ symbol, x, y })));
    const viewBox = `-0.05 -0.05 ${wide + 0.1} ${tall + 0.1}`;
    const style = `width:${Math.min(20, 124 / Math.max(wide, tall)) * wide}px`;
    const about = { role: "img", "aria-label": `${label}, ${tall} rows of ${wide}` };
    return svg("svg", { class: "arc-grid", viewBox, style, ...about }, coloured(cells));
  }

  scenes.arc = ({ pairs }) => {
    const list = el("div", { class: "arc-pairs" });
    const toggle = el("button", { type: "button", "aria-pressed": "false" }, "Colours as numbers");
    toggle.addEventListener("click", () =>
      toggle.setAttribute("aria-pressed", String(list.classList.toggle("with-numbers"))),
    );
    const figure = (name, note, rows) => {
      const caption = el("figcaption", {}, el("b", {}, name), el("span", {}, note));
      return el("figure", {}, arcGrid(rows, name), caption);
    };
    for (const { name, input, truth, votes, answers } of pairs) {
      const isSolved = answers.some((answer) => answer.right);
      const isKnown = truth !== null;
      const result =
        isKnown &&
        el("span", { class: verdict(isSolved) }, isSolved ? " ✓ solved" : " ✗ not solved");
      const given = answers.map(({ right, votes: own, confidence, grid }, i) => {
        const mark = right === null ? "" : right ? " ✓" : " ✗";
        const note = `${format(own)} of ${plural(votes, "vote")}, sure ${percent(confidence)}`;
        return figure(`Answer ${i + 1}${mark}`, note, grid);
      });
      const grids = [figure("Input", "", input), given, isKnown && figure("Truth", "", truth)];
      list.append(
        el("div", {}, el("h4", {}, name, result), el("div", { class: "arc-grids" }, grids)),
      );
    }
    return el("div", {}, el("div", { class: "controls" }, toggle), list);
  };

  scenes.text = ({ items, title }) => {
    const texts = items.map(({ prompt, continuation }) =>
      el(
        "pre",
        { class: "scene-text", tabindex: 0, role: "region", "aria-label": title },
        el("span", { class: "text-prompt" }, prompt),
        el("span", { class: "text-continuation" }, continuation),
      ),
    );
    const keys = ["prompt", "continuation"].map((name) =>
      el("span", { class: `text-${name}` }, name),
    );
    return el("div", {}, el("div", { class: "legend" }, keys), texts);
  };

  // Numbers are aligned right; the columns named in `percent` are shares.
  scenes.table = ({ title, columns, rows, percent: shares = [] }) => {
    const isNumeric = (c) => rows.some((row) => typeof row[c] === "number");
    const sort = (c) => (isNumeric(c) ? "number-cell" : null);
    const text = (value, c) =>
      typeof value !== "number"
        ? (value ?? "–")
        : shares.includes(c)
          ? percent(value)
          : format(value);
    const heads = columns.map((name, c) => el("th", { scope: "col", class: sort(c) }, name));
    const body = rows.map((row) =>
      el(
        "tr",
        {},
        row.map((value, c) => el("td", { class: sort(c) }, text(value, c))),
      ),
    );
    return el(
      "div",
      { class: "scroll tall", tabindex: 0, role: "region", "aria-label": title },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body)),
    );
  };
})();
