"use strict";
// Draws the model at work. A scene is a JSON object that an evaluation has left; each `kind` has a
// function here, called with an empty element and the scene. Text from data becomes text nodes.
(() => {
  const { el, svg, format } = window.lockstep;
  const scenes = (window.lockstepScenes = window.lockstepScenes || {});
  const percent = (share) => (share === null ? "–" : `${format(Math.round(1000 * share) / 10)} %`);
  const plural = (count, word) => `${format(count)} ${word}${count === 1 ? "" : "s"}`;
  const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const levels = (text) => [...text].map((letter) => LEVELS.indexOf(letter) / 63);
  // names of colours in scenes; anything else is not let into a style
  const colour = (name) =>
    /^(good|bad|accent|muted|changed|clue|c[1-8])$/.test(name) ? `var(--${name})` : "var(--c1)";

  function caption(element, scene) {
    if (scene.caption) element.append(el("p", { class: "scene-caption" }, scene.caption));
  }

  // Draws into a holder again whenever its width changes.
  function responsive(element, draw) {
    const holder = el("div", { class: "scene-holder" });
    element.append(holder);
    let width = 0;
    new ResizeObserver(() => {
      const now = Math.floor(holder.clientWidth);
      if (now && now !== width) {
        width = now;
        draw(holder, width);
      }
    }).observe(holder);
  }

  // ---- boards

  // Path data of squares inside a grid of unit cells.
  const squares = (cells, side, inset = 0) =>
    cells
      .map((cell) => {
        const x = (cell % side) + inset,
          y = Math.floor(cell / side) + inset,
          size = 1 - 2 * inset;
        return `M${x} ${y}h${size}v${size}h${-size}z`;
      })
      .join("");
  const crosses = (cells, side, inset = 0.2) =>
    cells
      .map((cell) => {
        const x = cell % side,
          y = Math.floor(cell / side),
          far = 1 - inset;
        return `M${x + inset} ${y + inset}L${x + far} ${y + far}M${x + far} ${y + inset}L${x + inset} ${y + far}`;
      })
      .join("");
  const discs = (cells, side, radius) =>
    cells
      .map((cell) => {
        const x = (cell % side) + 0.5 - radius,
          y = Math.floor(cell / side) + 0.5;
        return `M${x} ${y}a${radius} ${radius} 0 1 0 ${2 * radius} 0a${radius} ${radius} 0 1 0 ${-2 * radius} 0z`;
      })
      .join("");

  // Answers by step as strings; a step may be stored as the cells that changed.
  function answersOf(example) {
    const found = [];
    for (const step of example.answers) {
      if (typeof step === "string") {
        found.push(step);
        continue;
      }
      const cells = [...found[found.length - 1]];
      for (const [cell, letter] of Object.entries(step)) cells[Number(cell)] = letter;
      found.push(cells.join(""));
    }
    return found;
  }

  // What each cell is at a place of the slider: 0 is the puzzle as given, n the n-th answer.
  function cellsAt(scene, example, answers, place) {
    const empty = scene.board === "maze" ? " " : ".";
    const shown = place ? answers[place - 1] : example.inputs;
    const before = place > 1 ? answers[place - 2] : null;
    const sorts = {
      clue: [],
      right: [],
      wrong: [],
      missing: [],
      unknown: [],
      changed: [],
      fixed: 0,
      broken: 0,
    };
    for (let cell = 0; cell < shown.length; cell++) {
      const given = example.inputs[cell] !== empty,
        wanted = example.labels[cell],
        said = shown[cell];
      if (before && before[cell] !== said) {
        sorts.changed.push(cell);
        if (said === wanted) sorts.fixed++;
        else if (before[cell] === wanted) sorts.broken++;
      }
      const counted = wanted !== "-";
      if (given && (said === example.inputs[cell] || !place)) sorts.clue.push(cell);
      else if (!place) continue;
      else if (!counted) sorts.unknown.push(cell);
      else if (said === wanted) sorts.right.push(cell);
      else if (scene.board === "maze" && wanted === "o" && said === " ") sorts.missing.push(cell);
      else sorts.wrong.push(cell);
    }
    return { ...sorts, shown, given: example.inputs };
  }

  function sudoku(scene, cells) {
    const side = scene.side,
      [tall, wide] = scene.box || [side, side];
    const root = svg("g", { class: "sudoku" });
    root.append(
      svg("path", { class: "paper", d: `M0 0h${side}v${side}h${-side}z` }),
      svg("path", { class: "fill-clue", d: squares(cells.clue, side) }),
      svg("path", { class: "fill-wrong", d: squares(cells.wrong, side) }),
    );
    let thin = "",
      thick = "";
    for (let line = 0; line <= side; line++) {
      if (line % tall === 0 || line === side) thick += `M0 ${line}h${side}`;
      else thin += `M0 ${line}h${side}`;
      if (line % wide === 0 || line === side) thick += `M${line} 0v${side}`;
      else thin += `M${line} 0v${side}`;
    }
    root.append(svg("path", { class: "thin", d: thin }), svg("path", { class: "thick", d: thick }));
    for (const sort of ["clue", "right", "wrong", "unknown"])
      for (const cell of cells[sort]) {
        const letter = cells.shown[cell];
        if (letter === ".") continue;
        root.append(
          svg(
            "text",
            { class: `digit ${sort}`, x: (cell % side) + 0.5, y: Math.floor(cell / side) + 0.71 },
            letter,
          ),
        );
      }
    root.append(
      svg("path", { class: "mark-wrong", d: strokes(cells.wrong, side) }),
      svg("path", { class: "mark-changed", d: squares(cells.changed, side, 0.07) }),
    );
    return root;
  }
  // a stroke through what is wrong
  const strokes = (cells, side) =>
    cells
      .map((cell) => `M${(cell % side) + 0.2} ${Math.floor(cell / side) + 0.84}l.6 -.68`)
      .join("");

  function maze(scene, cells) {
    const side = scene.side,
      root = svg("g", { class: "maze" });
    const where = (letter) =>
      [...cells.given].flatMap((each, cell) => (each === letter ? [cell] : []));
    const path = cells.right.filter((cell) => cells.shown[cell] === "o");
    root.append(
      svg("path", { class: "paper", d: `M0 0h${side}v${side}h${-side}z` }),
      svg("path", { class: "wall", d: squares(where("#"), side, -0.01) }),
      svg("path", { class: "path-right", d: discs(path, side, 0.3) }),
      svg("path", {
        class: "path-unknown",
        d: discs(
          cells.unknown.filter((cell) => cells.shown[cell] === "o"),
          side,
          0.3,
        ),
      }),
      svg("path", { class: "path-missing", d: discs(cells.missing, side, 0.26) }),
    );
    for (const letter of ["S", "G"])
      for (const cell of where(letter)) {
        const x = cell % side,
          y = Math.floor(cell / side);
        root.append(
          svg("rect", { class: "end", x, y, width: 1, height: 1, rx: 0.2 }),
          svg("text", { class: "letter", x: x + 0.5, y: y + 0.76 }, letter),
        );
      }
    root.append(
      svg("path", { class: "fill-wrong", d: squares(cells.wrong, side) }),
      svg("path", { class: "mark-wrong", d: crosses(cells.wrong, side) }),
      svg("path", { class: "mark-changed", d: squares(cells.changed, side, 0.06) }),
    );
    return root;
  }

  const drawBoard = (scene, cells) => (scene.board === "maze" ? maze : sudoku)(scene, cells);

  function frame(scene, attributes, ...children) {
    const room = 0.06;
    const box = `${-room} ${-room} ${scene.side + 2 * room} ${scene.side + 2 * room}`;
    return svg("svg", { viewBox: box, ...attributes }, ...children);
  }

  function legendOf(scene) {
    const key = (draws, text) => {
      const cells = {
        clue: [],
        right: [],
        wrong: [],
        missing: [],
        unknown: [],
        changed: [],
        ...draws.cells,
      };
      const small = { board: scene.board, side: 1, box: [1, 1] };
      return el(
        "span",
        { class: "key" },
        frame(
          small,
          { class: "board-key", "aria-hidden": "true" },
          drawBoard(small, { ...cells, shown: draws.shown, given: draws.shown }),
        ),
        text,
      );
    };
    const sudokuKeys = [
      key({ shown: "7", cells: { clue: [0] } }, "clue"),
      key({ shown: "7", cells: { right: [0] } }, "right"),
      key({ shown: "7", cells: { wrong: [0] } }, "wrong (struck through)"),
      key({ shown: ".", cells: { changed: [0] } }, "changed in this step"),
    ];
    const mazeKeys = [
      key({ shown: "#", cells: { clue: [0] } }, "wall"),
      key({ shown: "o", cells: { right: [0] } }, "path, right"),
      key({ shown: " ", cells: { missing: [0] } }, "path, missing"),
      key({ shown: "o", cells: { wrong: [0] } }, "wrong"),
      key({ shown: " ", cells: { changed: [0] } }, "changed in this step"),
    ];
    return el("div", { class: "scene-legend" }, scene.board === "maze" ? mazeKeys : sudokuKeys);
  }

  // The wish to halt after each step, as bars that choose the step.
  function haltingChart(scene, example, choose) {
    const count = scene.steps.length,
      wide = 100 / count;
    const bars = example.halting.map((share, i) =>
      svg(
        "g",
        { class: "halt-step", onclick: () => choose(i + 1) },
        svg("rect", { class: "halt-room", x: i * wide, y: 0, width: wide, height: 60 }),
        svg("rect", {
          class: "halt-bar",
          x: i * wide + wide * 0.14,
          y: 60 - 60 * (share || 0),
          width: wide * 0.72,
          height: Math.max(0.8, 60 * (share || 0)),
        }),
        svg("title", {}, `step ${scene.steps[i]}: ${percent(share)}`),
      ),
    );
    const chart = svg(
      "svg",
      {
        class: "halt-chart",
        viewBox: "0 0 100 60",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `halting value by thinking step: ${example.halting.map(percent).join(", ")}`,
      },
      bars,
      svg("line", { class: "halt-threshold", x1: 0, x2: 100, y1: 30, y2: 30 }),
    );
    const sparse = Math.ceil(count / 16);
    const names = el(
      "div",
      { class: "halt-names", "aria-hidden": "true" },
      scene.steps.map((step, i) => el("span", {}, i % sparse === 0 ? step : "")),
    );
    const mark = (place) => bars.forEach((bar, i) => bar.classList.toggle("now", i === place - 1));
    return { parts: [chart, names], mark };
  }

  scenes.boards = (element, scene) => {
    caption(element, scene);
    const last = scene.steps.length;
    let example = null,
      answers = [],
      place = 1,
      timer = null,
      halting = null;

    const board = frame(scene, { class: "board", role: "img" });
    const slider = el("input", {
      type: "range",
      min: 0,
      max: last,
      step: 1,
      value: 1,
      "aria-label": "Thinking step",
      oninput: () => {
        pause();
        show(Number(slider.value));
      },
    });
    const play = el("button", {
      type: "button",
      class: "play",
      onclick: () => (timer ? pause() : start()),
    });
    const readout = el("output", { class: "step-name" });
    const facts = el("dl", { class: "board-facts" });
    const haltingPlace = el("div", { class: "halt" });
    const strip = el("div", { class: "thumbs", role: "group", "aria-label": "Examples" });

    function pause() {
      clearInterval(timer);
      timer = null;
      play.replaceChildren(el("span", { "aria-hidden": "true" }, "▶ "), "Play");
    }
    function start() {
      if (place >= last) show(0);
      timer = setInterval(
        () => {
          if (!element.isConnected || place >= last) pause();
          else show(place + 1);
          if (place >= last) pause();
        },
        last > 20 ? 350 : 650,
      );
      play.replaceChildren(el("span", { "aria-hidden": "true" }, "❚❚ "), "Pause");
    }
    function show(next) {
      place = next;
      const cells = cellsAt(scene, example, answers, place);
      const name = place
        ? `Step ${scene.steps[place - 1]} of ${scene.steps[last - 1]}`
        : "The puzzle as given";
      board.replaceChildren(drawBoard(scene, cells));
      const counted = [...example.labels].filter((letter) => letter !== "-").length;
      const right = place ? counted - cells.wrong.length - cells.missing.length : null;
      const text = place && counted ? `${format(right)} of ${format(counted)} cells right` : "";
      board.setAttribute(
        "aria-label",
        `${name}. ${text}${place > 1 ? `, ${plural(cells.changed.length, "cell")} changed` : ""}`,
      );
      slider.value = String(place);
      slider.setAttribute("aria-valuetext", `${name}${text ? `, ${text}` : ""}`);
      readout.replaceChildren(name);
      const fact = (title, value, sort) => [
        el("dt", {}, title),
        el("dd", { class: sort || null }, value),
      ];
      facts.replaceChildren(
        ...fact("right", place && counted ? `${format(right)} of ${format(counted)}` : "–"),
        ...fact(
          "fixed in this step",
          place > 1 ? format(cells.fixed) : "–",
          cells.fixed ? "good-text" : "",
        ),
        ...fact(
          "broken in this step",
          place > 1 ? format(cells.broken) : "–",
          cells.broken ? "bad-text" : "",
        ),
        ...fact("halting value", place ? percent(example.halting[place - 1]) : "–"),
        ...fact("halts at", example.halt_step ? `step ${example.halt_step}` : "no step"),
      );
      halting.mark(place);
    }
    function choose(index) {
      example = scene.examples[index];
      answers = answersOf(example);
      halting = haltingChart(scene, example, (next) => {
        pause();
        show(next);
      });
      haltingPlace.replaceChildren(
        el("div", { class: "halt-title" }, "Halting value by step", el("span", {}, "line: 50 %")),
        ...halting.parts,
      );
      [...strip.children].forEach((thumb, i) =>
        thumb.setAttribute("aria-pressed", String(i === index)),
      );
      show(Math.min(Math.max(place, 1), last));
    }

    scene.examples.forEach((each, index) => {
      const all = answersOf(each),
        cells = cellsAt(scene, each, all, all.length);
      const verdict = each.solved ? "solved" : "not solved";
      strip.append(
        el(
          "button",
          {
            type: "button",
            class: `thumb ${each.solved ? "solved" : "unsolved"}`,
            "aria-pressed": "false",
            "aria-label": `Example ${each.index}, ${verdict}`,
            onclick: () => {
              pause();
              choose(index);
            },
          },
          frame(scene, { "aria-hidden": "true" }, drawThumb(scene, cells)),
          el(
            "span",
            { class: "thumb-name" },
            el("b", { "aria-hidden": "true" }, each.solved ? "✓" : "✗"),
            ` ${each.index}`,
          ),
        ),
      );
    });
    const controls = el(
      "div",
      { class: "controls board-controls" },
      play,
      el("label", { class: "step-slider" }, slider),
      readout,
    );
    element.append(
      strip,
      el(
        "div",
        { class: "board-layout" },
        el("div", { class: "board-side" }, board, controls),
        el("div", { class: "board-about" }, facts, haltingPlace, legendOf(scene)),
      ),
    );
    strip.hidden = scene.examples.length < 2;
    pause();
    choose(0);
  };

  // Small boards show sorts of cells, not digits.
  function drawThumb(scene, cells) {
    const side = scene.side,
      walls =
        scene.board === "maze"
          ? [...cells.given].flatMap((each, cell) => (each === "#" ? [cell] : []))
          : cells.clue;
    const path =
      scene.board === "maze"
        ? cells.right.filter((cell) => cells.shown[cell] === "o")
        : cells.right;
    return svg(
      "g",
      { class: scene.board === "maze" ? "maze" : "sudoku" },
      svg("path", { class: "paper", d: `M0 0h${side}v${side}h${-side}z` }),
      svg("path", {
        class: scene.board === "maze" ? "wall" : "thumb-clue",
        d: squares(walls, side),
      }),
      svg("path", {
        class: "thumb-right",
        d: squares(path, side, scene.board === "maze" ? 0 : 0.18),
      }),
      svg("path", {
        class: "thumb-wrong",
        d: squares([...cells.wrong, ...cells.missing], side, 0),
      }),
    );
  }

  // ---- lines and bars

  scenes.lines = (element, scene) => {
    caption(element, scene);
    const series = scene.lines.map((line, i) => ({
      name: line.name,
      color: colour(line.colour),
      dashed: i % 2 === 1,
      dots: scene.x.values.length <= 40,
      x: scene.x.values,
      y: line.values,
    }));
    element.append(
      el(
        "div",
        { class: "legend" },
        series.map((one) =>
          el(
            "span",
            {},
            el("span", {
              class: `swatch${one.dashed ? " dashed" : ""}`,
              style: `border-color:${one.color}`,
            }),
            one.name,
          ),
        ),
      ),
    );
    const whole = scene.x.values.every(Number.isInteger);
    const shows = scene.y.percent ? percent : format;
    window.lockstep.chart(element, {
      title: scene.title,
      series,
      height: 240,
      xLabel: scene.x.label,
      xName: scene.x.label,
      yFormat: shows,
      yTick: scene.y.percent ? (share) => `${Math.round(100 * share)} %` : undefined,
      xTicks: whole ? wholeTicks : undefined,
      xValue: whole ? format : undefined,
      least: scene.y.min,
      most: scene.y.max,
    });
  };

  function wholeTicks(low, high, count) {
    const step = Math.max(1, niceStep((high - low) / Math.max(1, count))),
      found = [];
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
    return found;
  }
  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough || 1));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  }

  scenes.bars = (element, scene) => {
    caption(element, scene);
    const shows = scene.y.percent ? percent : format;
    if (scene.series.length > 1)
      element.append(
        el(
          "div",
          { class: "legend" },
          scene.series.map((one, i) => el("span", {}, swatch(one, i), one.name)),
        ),
      );
    const readout = el("p", { class: "scene-readout", role: "status" });
    const say = (place) => {
      const about = scene.series.map((one) => {
        const interval = one.low ? ` (${shows(one.low[place])} to ${shows(one.high[place])})` : "";
        return `${scene.series.length > 1 ? `${one.name} ` : ""}${shows(one.values[place])}${interval}`;
      });
      readout.replaceChildren(
        el(
          "b",
          {},
          [scene.x.label, scene.x.values[place]].filter((each) => each !== undefined).join(" "),
        ),
        `: ${about.join(", ")}`,
      );
    };
    responsive(element, (holder, width) =>
      holder.replaceChildren((scene.horizontal ? across : upright)(scene, width, shows, say)),
    );
    element.append(readout);
    readout.append("Point at a bar, or use the arrow keys, for its numbers.");
  };
  const swatch = (one, i) =>
    svg(
      "svg",
      { class: "bar-key", viewBox: "0 0 12 12", "aria-hidden": "true" },
      svg("rect", { width: 12, height: 12, style: `fill:${colour(one.colour)}` }),
      i % 2 ? hatching("M-2 8L8 -2M2 14L14 2") : null,
    );
  // the second series is hatched, so that colour is not all that tells it from the first
  const hatching = (d) => svg("path", { class: "hatch", d });

  // Stacked columns; with `diverging` the second series goes down.
  function upright(scene, width, shows, say) {
    const height = 220,
      margin = {
        left: 50,
        right: 8,
        top: scene.y.label ? 26 : 10,
        bottom: scene.x.label ? 40 : 24,
      };
    const bottom = height - margin.bottom,
      count = scene.x.values.length;
    const up = (i) =>
      scene.series.reduce(
        (sum, one, s) => sum + (scene.diverging && s ? 0 : one.values[i] || 0),
        0,
      );
    const down = (i) =>
      scene.diverging
        ? scene.series.slice(1).reduce((sum, one) => sum + (one.values[i] || 0), 0)
        : 0;
    const places = [...scene.x.values.keys()];
    const most = Math.max(...places.map(up)) || 1, // an axis, also where there is nothing
      least = -Math.max(...places.map(down), 0);
    const y = (value) => margin.top + ((most - value) / (most - least)) * (bottom - margin.top);
    const wide = (width - margin.left - margin.right) / Math.max(1, count),
      bar = Math.min(46, wide * 0.72);
    const root = svg("svg", {
      class: "bars",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": `${scene.title}; left and right arrows go from bar to bar`,
    });
    for (const value of ticksOf(least, most, 5)) {
      root.append(
        svg("line", {
          class: "rule",
          x1: margin.left,
          x2: width - margin.right,
          y1: y(value),
          y2: y(value),
        }),
        svg(
          "text",
          { x: margin.left - 8, y: y(value) + 4, "text-anchor": "end" },
          shows(Math.abs(value)),
        ),
      );
    }
    const every = Math.max(1, Math.ceil(44 / wide)),
      groups = [];
    places.forEach((i) => {
      const centre = margin.left + (i + 0.5) * wide,
        group = svg("g", { class: "bar" });
      group.append(
        svg("rect", {
          class: "bar-room",
          x: centre - wide / 2,
          y: margin.top,
          width: wide,
          height: bottom - margin.top,
        }),
      );
      let top = 0,
        low = 0;
      scene.series.forEach((one, s) => {
        const value = one.values[i] || 0;
        let from = top,
          to = (top += value);
        if (scene.diverging && s) {
          top -= value;
          from = low;
          to = low -= value;
        }
        const x = centre - bar / 2,
          y0 = Math.min(y(from), y(to)),
          tall = Math.abs(y(from) - y(to));
        if (!value) return;
        group.append(
          svg("rect", {
            x,
            y: y0,
            width: bar,
            height: Math.max(1, tall),
            style: `fill:${colour(one.colour)}`,
          }),
        );
        if (s % 2) group.append(hatching(hatch(x, y0, bar, tall)));
      });
      const label = scene.x.values[i],
        word = typeof label === "string";
      if (i % every === 0 || (word && i === count - 1))
        group.append(
          svg("text", { x: centre, y: bottom + 16, "text-anchor": "middle" }, format2(label)),
        );
      group.addEventListener("pointerenter", () => focus(i));
      groups.push(group);
      root.append(group);
    });
    root.append(
      svg("line", { class: "base", x1: margin.left, x2: width - margin.right, y1: y(0), y2: y(0) }),
    );
    if (scene.x.label)
      root.append(
        svg(
          "text",
          { x: width - margin.right, y: height - 4, "text-anchor": "end" },
          scene.x.label,
        ),
      );
    if (scene.y.label) root.append(svg("text", { x: 0, y: 12 }, scene.y.label));
    const focus = walk(root, groups, say);
    return root;
  }
  const format2 = (value) => (typeof value === "number" ? format(value) : String(value));

  // Short strokes from lower left to upper right within a rectangle.
  function hatch(x, y, width, height) {
    let d = "";
    for (let at = 5; at < width + height; at += 6) {
      const x0 = Math.max(0, at - height),
        y0 = Math.min(height, at),
        x1 = Math.min(width, at),
        y1 = Math.max(0, at - width);
      d += `M${(x + x0).toFixed(1)} ${(y + y0).toFixed(1)}L${(x + x1).toFixed(1)} ${(y + y1).toFixed(1)}`;
    }
    return d;
  }

  // Bars with a name each, and whiskers where there are intervals.
  function across(scene, width, shows, say) {
    const longest = Math.max(...scene.x.values.map((name) => String(name).length), 1);
    const left = Math.min(width * 0.45, 14 + 6.6 * longest),
      right = 62,
      thick = scene.series.length > 1 ? 11 : 16;
    const row = scene.series.length * (thick + 2) + 10,
      height = row * scene.x.values.length + 24;
    const found = scene.series
      .flatMap((one) => one.high || one.values)
      .filter((value) => value !== null);
    const most = scene.y.max || Math.max(0, ...found) || 1;
    const x = (value) => left + (value / most) * (width - left - right);
    const root = svg("svg", {
      class: "bars",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": `${scene.title}; up and down arrows go from bar to bar`,
    });
    const whole = found.every(Number.isInteger);
    for (const value of ticksOf(0, most, Math.max(2, (width - left - right) / 90)).filter(
      (tick) => !whole || Number.isInteger(tick),
    ))
      root.append(
        svg("line", { class: "rule", x1: x(value), x2: x(value), y1: 2, y2: height - 20 }),
        svg("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, shows(value)),
      );
    const groups = scene.x.values.map((name, i) => {
      const top = i * row + 4,
        group = svg("g", { class: `bar${scene.pale && scene.pale[i] ? " pale" : ""}` });
      group.append(
        svg("rect", { class: "bar-room", x: 0, y: top - 4, width, height: row }),
        svg(
          "text",
          { class: "bar-name", x: left - 8, y: top + (row - 8) / 2 + 3, "text-anchor": "end" },
          clipped(String(name), (left - 10) / 6.6),
          svg("title", {}, String(name)),
        ),
      );
      scene.series.forEach((one, s) => {
        const value = one.values[i],
          y = top + s * (thick + 2);
        if (value === null || value === undefined) return;
        group.append(
          svg("rect", {
            class: "bar-fill",
            x: left,
            y,
            width: Math.max(1, x(value) - left),
            height: thick,
            style: `fill:${colour(one.colour)}`,
          }),
        );
        if (s % 2) group.append(hatching(hatch(left, y, x(value) - left, thick)));
        let end = x(value);
        if (one.low && one.high) {
          const middle = y + thick / 2;
          group.append(
            svg("path", {
              class: "whisker",
              d: `M${x(one.low[i])} ${middle}H${x(one.high[i])}M${x(one.low[i])} ${middle - 3}v6M${x(one.high[i])} ${middle - 3}v6`,
            }),
          );
          end = x(one.high[i]);
        }
        group.append(
          svg("text", { class: "bar-value", x: end + 6, y: y + thick / 2 + 4 }, shows(value)),
        );
      });
      group.addEventListener("pointerenter", () => focus(i));
      root.append(group);
      return group;
    });
    root.append(svg("line", { class: "base", x1: left, x2: left, y1: 2, y2: height - 20 }));
    const focus = walk(root, groups, say);
    return root;
  }
  const clipped = (text, most) =>
    text.length > most ? `${text.slice(0, Math.max(1, Math.floor(most) - 1))}…` : text;

  function ticksOf(low, high, count) {
    const step = niceStep((high - low) / Math.max(1, count)),
      found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++)
      found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  // Arrow keys go from one group to the next; returns what brings one to the front.
  function walk(root, groups, say) {
    let now = -1;
    const focus = (place) => {
      now = place;
      groups.forEach((group, i) => group.classList.toggle("now", i === place));
      say(place);
    };
    root.addEventListener("keydown", (event) => {
      const step = {
        ArrowLeft: -1,
        ArrowUp: -1,
        ArrowRight: 1,
        ArrowDown: 1,
        Home: -1e9,
        End: 1e9,
      }[event.key];
      if (step === undefined || !groups.length) return;
      event.preventDefault();
      focus(Math.max(0, Math.min(groups.length - 1, now < 0 ? 0 : now + step)));
    });
    return focus;
  }

  // ---- matrices

  scenes.matrix = (element, scene) => {
    caption(element, scene);
    const holder = el("div", { class: "matrices" });
    element.append(holder);
    for (const panel of scene.panels) {
      const place = el("figure", { class: "matrix-panel" });
      if (panel.name) place.append(el("figcaption", {}, panel.name));
      holder.append(place);
      matrix(place, scene, panel);
    }
  };

  function matrix(element, scene, panel) {
    const counts = Boolean(panel.values);
    const values = counts ? panel.values : panel.levels.map(levels);
    const sums = values.map((row) => row.reduce((sum, value) => sum + Math.abs(value || 0), 0));
    const most = scene.shares || !counts ? 1 : Math.max(0, ...values.flat().map(Math.abs)) || 1;
    const share = (r, c) =>
      scene.shares ? (values[r][c] || 0) / (sums[r] || 1) : (values[r][c] || 0) / most;
    const readout = el(
      "p",
      { class: "scene-readout", role: "status" },
      "Point at a cell, or use the arrow keys, for its value.",
    );
    const say = (r, c) => {
      const value = counts
        ? format(values[r][c])
        : `${values[r][c] > 0 && values[r][c] < 1 ? "≈ " : ""}${format(Math.round(100 * values[r][c]) / 100)}`;
      const of = scene.shares ? ` of ${format(sums[r])} (${percent(share(r, c))})` : "";
      readout.replaceChildren(
        el(
          "b",
          {},
          `${scene.row_label} ${panel.rows[r]}, ${scene.column_label} ${panel.columns[c]}`,
        ),
        `: ${value}${of}`,
      );
    };
    responsive(element, (holder, width) =>
      holder.replaceChildren(matrixPicture(scene, panel, values, share, counts, width, say)),
    );
    element.append(colourBar(scene, counts, most), readout);
  }

  function matrixPicture(scene, panel, values, share, counts, width, say) {
    const rows = panel.rows.length,
      columns = panel.columns.length;
    const left = 30 + 6.5 * Math.max(...panel.rows.map((name) => String(name).length)),
      top = 20;
    const size = Math.max(1.5, Math.min(34, (width - left - 4) / columns)),
      tall = Math.min(size, Math.max(6, 420 / rows));
    const full = { width: left + size * columns + 4, height: top + tall * rows + 24 };
    const root = svg("svg", {
      class: "matrix",
      viewBox: `0 0 ${full.width} ${full.height}`,
      width: full.width,
      height: full.height,
      role: "img",
      tabindex: 0,
      "aria-label": `${panel.name || scene.title}: ${scene.row_label} by ${scene.column_label}; arrow keys go from cell to cell`,
    });
    root.append(
      svg("rect", {
        class: "matrix-paper",
        x: left,
        y: top,
        width: size * columns,
        height: tall * rows,
      }),
    );
    const byLevel = new Map();
    for (let r = 0; r < rows; r++)
      for (let c = 0; c < columns; c++) {
        const level = Math.round(Math.min(1, Math.abs(share(r, c))) * 40);
        if (level)
          byLevel.set(
            level,
            `${byLevel.get(level) || ""}M${(left + c * size).toFixed(2)} ${(top + r * tall).toFixed(2)}h${size.toFixed(2)}v${tall.toFixed(2)}h${(-size).toFixed(2)}z`,
          );
      }
    for (const [level, d] of byLevel)
      root.append(svg("path", { class: "matrix-fill", d, "fill-opacity": level / 40 }));
    if (counts && size >= 18)
      for (let r = 0; r < rows; r++)
        for (let c = 0; c < columns; c++)
          if (values[r][c])
            root.append(
              svg(
                "text",
                {
                  class: `cell-number${share(r, c) > 0.5 ? " on-dark" : ""}`,
                  x: left + (c + 0.5) * size,
                  y: top + (r + 0.5) * tall + 4,
                  "text-anchor": "middle",
                },
                format(values[r][c]),
              ),
            );
    labels(panel.rows, tall, 13, (i, text) =>
      root.append(
        svg("text", { x: left - 6, y: top + (i + 0.5) * tall + 4, "text-anchor": "end" }, text),
      ),
    );
    const wide = 7 * Math.max(...panel.columns.map((name) => String(name).length)) + 5;
    labels(panel.columns, size, wide, (i, text) =>
      root.append(
        svg("text", { x: left + (i + 0.5) * size, y: top - 6, "text-anchor": "middle" }, text),
      ),
    );
    root.append(
      svg(
        "text",
        { class: "axis-name", x: left + size * columns, y: full.height - 7, "text-anchor": "end" },
        `${scene.column_label} →`,
      ),
      svg(
        "text",
        {
          class: "axis-name",
          transform: `translate(11 ${top + (tall * rows) / 2}) rotate(-90)`,
          "text-anchor": "middle",
        },
        scene.row_label,
      ),
    );
    const cursor = svg("rect", {
      class: "cursor",
      width: size,
      height: tall,
      visibility: "hidden",
    });
    root.append(cursor);
    let at = null;
    const show = (r, c) => {
      at = [Math.max(0, Math.min(rows - 1, r)), Math.max(0, Math.min(columns - 1, c))];
      cursor.setAttribute("x", left + at[1] * size);
      cursor.setAttribute("y", top + at[0] * tall);
      cursor.setAttribute("visibility", "visible");
      say(...at);
    };
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      const c = Math.floor(((event.clientX - box.left) * (full.width / box.width) - left) / size);
      const r = Math.floor(((event.clientY - box.top) * (full.height / box.height) - top) / tall);
      if (r >= 0 && c >= 0 && r < rows && c < columns) show(r, c);
    });
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[
        event.key
      ];
      if (!step) return;
      event.preventDefault();
      show(...(at ? [at[0] + step[0], at[1] + step[1]] : [0, 0]));
    });
    return root;
  }

  // As many labels as there is room for.
  function labels(names, size, room, draw) {
    const every = Math.max(1, niceStep(Math.ceil(room / size)));
    names.forEach((name, i) => {
      if (i % every === 0) draw(i, String(name));
    });
  }

  function colourBar(scene, counts, most) {
    const stops = [...Array(10).keys()].map((i) =>
      svg("rect", {
        class: "matrix-fill",
        x: i * 10,
        y: 0,
        width: 10.2,
        height: 8,
        "fill-opacity": (i + 0.5) / 10,
      }),
    );
    const end = scene.shares
      ? ["0 %", `100 % of the ${scene.row_label}`]
      : ["0", format(counts ? most : 1)];
    return el(
      "div",
      { class: "colour-bar" },
      el("span", {}, end[0]),
      svg(
        "svg",
        { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { class: "matrix-paper", width: 100, height: 8 }),
        stops,
      ),
      el("span", {}, end[1]),
    );
  }

  // ---- pictures

  scenes.images = (element, scene) => {
    caption(element, scene);
    element.append(
      el(
        "div",
        { class: "images" },
        scene.items.map((item) => {
          const canvas = el("canvas", {
            width: scene.width,
            height: scene.height,
            role: "img",
            "aria-label": `image ${item.index}: a ${item.truth}, taken for ${item.answer}`,
          });
          const context = canvas.getContext("2d"),
            image = context.createImageData(scene.width, scene.height);
          levels(item.pixels).forEach((value, i) =>
            image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i),
          );
          context.putImageData(image, 0, 0);
          return el(
            "figure",
            {},
            canvas,
            el(
              "figcaption",
              {},
              el(
                "span",
                {},
                el("b", { class: "bad-text" }, item.answer),
                " instead of ",
                el("b", {}, item.truth),
              ),
              el("span", {}, `sure ${percent(item.share)}`),
            ),
          );
        }),
      ),
    );
  };

  // ---- ARC

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
  const LIGHT = new Set(["3", "4", "5", "7", "8"]);

  function arcGrid(lines, label) {
    const tall = lines.length,
      wide = tall ? lines[0].length : 0;
    if (!tall || !wide)
      return el(
        "div",
        { class: "arc-empty", role: "img", "aria-label": `${label}: empty` },
        "no grid",
      );
    const root = svg("svg", {
      class: "arc-grid",
      viewBox: `-0.05 -0.05 ${wide + 0.1} ${tall + 0.1}`,
      role: "img",
      "aria-label": `${label}, ${tall} rows of ${wide}`,
    });
    const paths = {};
    lines.forEach((line, y) =>
      [...line].forEach((digit, x) => {
        paths[digit] = `${paths[digit] || ""}M${x} ${y}h1v1h-1z`;
      }),
    );
    for (const [digit, d] of Object.entries(paths))
      root.append(svg("path", { d, fill: PALETTE[Number(digit)] || "#ffffff" }));
    let grid = "";
    for (let y = 0; y <= tall; y++) grid += `M0 ${y}h${wide}`;
    for (let x = 0; x <= wide; x++) grid += `M${x} 0v${tall}`;
    root.append(svg("path", { class: "arc-lines", d: grid }));
    const numbers = svg("g", { class: "arc-numbers" });
    lines.forEach((line, y) =>
      [...line].forEach((digit, x) =>
        numbers.append(
          svg(
            "text",
            { x: x + 0.5, y: y + 0.75, fill: LIGHT.has(digit) ? "#000000" : "#ffffff" },
            digit,
          ),
        ),
      ),
    );
    root.append(numbers);
    const cell = Math.min(20, 124 / Math.max(wide, tall));
    root.style.width = `${cell * wide}px`;
    return root;
  }

  scenes.arc = (element, scene) => {
    caption(element, scene);
    const list = el("div", { class: "arc-pairs" });
    const toggle = el(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        onclick: () => {
          const on = list.classList.toggle("with-numbers");
          toggle.setAttribute("aria-pressed", String(on));
        },
      },
      "Colours as numbers",
    );
    element.append(el("div", { class: "controls" }, toggle), list);
    const figure = (name, note, lines) =>
      el(
        "figure",
        {},
        arcGrid(lines, name),
        el("figcaption", {}, el("b", {}, name), note ? el("span", {}, note) : null),
      );
    for (const pair of scene.pairs) {
      const solved = pair.answers.some((answer) => answer.right),
        known = pair.truth !== null;
      list.append(
        el(
          "div",
          { class: "arc-pair" },
          el(
            "h4",
            {},
            pair.name,
            known
              ? el(
                  "span",
                  { class: solved ? "good-text" : "bad-text" },
                  solved ? " ✓ solved" : " ✗ not solved",
                )
              : null,
          ),
          el(
            "div",
            { class: "arc-grids" },
            figure("Input", "", pair.input),
            pair.answers.map((answer, i) =>
              figure(
                `Answer ${i + 1}${answer.right === null ? "" : answer.right ? " ✓" : " ✗"}`,
                `${format(answer.votes)} of ${plural(pair.votes, "vote")}, sure ${percent(answer.confidence)}`,
                answer.grid,
              ),
            ),
            known ? figure("Truth", "", pair.truth) : null,
          ),
        ),
      );
    }
  };

  // ---- text

  scenes.text = (element, scene) => {
    caption(element, scene);
    element.append(
      el(
        "div",
        { class: "legend" },
        el("span", { class: "text-prompt" }, "prompt"),
        el("span", { class: "text-continuation" }, "continuation"),
      ),
    );
    for (const item of scene.items)
      element.append(
        el(
          "pre",
          { class: "scene-text", tabindex: 0, role: "region", "aria-label": scene.title },
          el("span", { class: "text-prompt" }, item.prompt),
          el("span", { class: "text-continuation" }, item.continuation),
        ),
      );
  };

  // Numbers stand to the right; the columns named in `percent` are shares.
  scenes.table = (element, scene) => {
    caption(element, scene);
    const shares = new Set(scene.percent || []);
    const cell = (value, c) => {
      if (typeof value !== "number") return el("td", {}, value === null ? "–" : String(value));
      return el("td", { class: "number-cell" }, shares.has(c) ? percent(value) : format(value));
    };
    const numeric = (c) => scene.rows.some((row) => typeof row[c] === "number");
    element.append(
      el(
        "div",
        { class: "table-holder tall", tabindex: 0, role: "region", "aria-label": scene.title },
        el(
          "table",
          { class: "scene-table" },
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              scene.columns.map((name, c) =>
                el("th", { scope: "col", class: numeric(c) ? "number-cell" : null }, name),
              ),
            ),
          ),
          el(
            "tbody",
            {},
            scene.rows.map((row) => el("tr", {}, row.map(cell))),
          ),
        ),
      ),
    );
  };

  scenes.questions = (element, scene) => {
    caption(element, scene);
    element.append(
      el(
        "div",
        { class: "questions" },
        scene.items.map((item) => {
          const models = [...new Set(item.answers.map((answer) => answer.model))],
            ways = [...new Set(item.answers.map((answer) => answer.from))];
          const cell = (way, model) => {
            const answer = item.answers.find((each) => each.from === way && each.model === model);
            if (!answer) return el("td", {}, "–");
            return el(
              "td",
              { class: answer.right ? "good-text" : "bad-text" },
              el("b", {}, answer.right ? "✓ " : "✗ "),
              answer.said || el("i", {}, "nothing"),
            );
          };
          return el(
            "article",
            { class: "question" },
            el("h4", {}, item.question),
            el("p", { class: "wanted" }, "right: ", el("b", {}, item.wanted.join(" · "))),
            el("details", {}, el("summary", {}, "the text"), el("p", {}, item.context)),
            el(
              "div",
              { class: "table-holder", tabindex: 0, role: "region", "aria-label": "answers" },
              el(
                "table",
                {},
                el(
                  "thead",
                  {},
                  el(
                    "tr",
                    {},
                    el("th", { scope: "col" }, "answered from"),
                    models.map((model) => el("th", { scope: "col" }, `model ${model}`)),
                  ),
                ),
                el(
                  "tbody",
                  {},
                  ways.map((way) =>
                    el(
                      "tr",
                      {},
                      el("th", { scope: "row" }, way),
                      models.map((model) => cell(way, model)),
                    ),
                  ),
                ),
              ),
            ),
          );
        }),
      ),
    );
  };
})();
