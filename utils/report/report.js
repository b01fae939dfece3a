"use strict";
// The report page. Elements are made with createElement and text nodes, never from markup.
const lockstep = (() => {
  const payload = JSON.parse(document.getElementById("payload").textContent);
  const { runs, sweep } = payload;
  const several = runs.length > 1;
  const scenes = {}; // functions that draw scenes, by kind

  // What the reader has chosen. The history keeps it while the page reloads.
  const view = { axis: "step", log: false, smooth: 0.6, hidden: [], dark: null, ...history.state };
  const charts = [];
  function change(chosen) {
    Object.assign(view, chosen);
    history.replaceState(view, "");
    for (const redraw of charts) redraw();
  }

  // ---- elements

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity))
      if (child !== null && child !== undefined && child !== false)
        node.append(child instanceof Node ? child : String(child));
    return node;
  }
  const el = (tag, attributes, ...children) =>
    fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const links = [];
  function section(id, title, about, ...children) {
    links.push(el("a", { href: `#${id}` }, title));
    const heading = el("h2", { id: `${id}-title` }, title);
    const note = about && el("p", { class: "about" }, about);
    return el("section", { id, "aria-labelledby": `${id}-title` }, heading, note, children);
  }
  const panel = (...children) => el("div", { class: "panel" }, children);
  const heading = (title, ...beside) =>
    el("div", { class: "heading" }, el("h3", {}, title), beside);
  const code = (text, shown = text) => el("code", { title: text }, shown);
  const swatch = (color, dashed) =>
    el("span", { class: `swatch${dashed ? " dashed" : ""}`, style: `border-color:${color}` });

  function table(titles, rows, name = "table") {
    const heads = titles.map((title) => el("th", { scope: "col" }, title));
    const body = rows.map((row) =>
      el(
        "tr",
        {},
        row.map((cell) => el("td", {}, cell)),
      ),
    );
    return el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": name },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body)),
    );
  }
  const details = (title, about, ...children) =>
    el(
      "details",
      { class: "panel" },
      el("summary", {}, title, el("span", { class: "over" }, about)),
      children,
    );

  function copyButton(text, what) {
    const button = el(
      "button",
      { type: "button", class: "copy", "aria-label": `Copy ${what}` },
      "Copy",
    );
    button.addEventListener("click", async () => {
      // a page that comes by plain HTTP has no clipboard
      if (!navigator.clipboard) return prompt(`Copy ${what}:`, text);
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => button.replaceChildren("Copy"), 1500);
    });
    return button;
  }

  // What one part of the page cannot draw must not take the others with it.
  function attempt(draw, ...given) {
    try {
      return draw(...given);
    } catch (error) {
      return el("p", { class: "empty" }, `This part cannot be drawn (${error.message}).`);
    }
  }

  // ---- numbers

  function format(number) {
    if (!Number.isFinite(number)) return "–";
    const size = Math.abs(number);
    if (size && (size < 1e-3 || size >= 1e9)) return number.toExponential(2).replace("e+", "e");
    if (Number.isInteger(number) || size >= 1000) return Math.round(number).toLocaleString("en-US");
    return String(Number(number.toPrecision(4)));
  }
  function scaled(number, base, letters, digits) {
    const power = Math.floor(Math.log(Math.abs(number)) / Math.log(base) + 1e-12);
    const place = Math.max(0, Math.min(letters.length - 1, power));
    return `${Number((number / base ** place).toPrecision(digits))}${letters[place]}`;
  }
  function short(number, digits = 3) {
    if (!number) return "0";
    if (Math.abs(number) < 1e-3 || Math.abs(number) >= 1e15)
      return Number(number.toPrecision(digits)).toExponential().replace("e+", "e");
    return scaled(number, 1000, ["", "k", "M", "G", "T"], digits);
  }
  const bytes = (number) =>
    number ? scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB"], 4) : "0 B";
  const percent = (share) =>
    Number.isFinite(share) ? `${Number((100 * share).toFixed(2))}\u00a0%` : "–";
  const UNITS = { "%": percent, bytes, ms: (value) => `${format(value)} ms`, "": format };
  const textOf = (unit) => (value) => (Number.isFinite(value) ? UNITS[unit](value) : "–");

  function duration(seconds) {
    if (!Number.isFinite(seconds)) return "–";
    if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
    const [s, m, h] = [1, 60, 3600].map((unit) => Math.floor(Math.round(seconds) / unit));
    if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
    if (h) return `${h} h ${m % 60} min`;
    return m ? `${m} min ${s % 60} s` : `${s} s`;
  }
  const plural = (count, word) => `${format(count)}\u00a0${word}${count === 1 ? "" : "s"}`;
  const day = (seconds) => new Date(seconds * 1000).toLocaleString("sv-SE").slice(0, 16);
  const ABBREVIATIONS = {
    lr: "learning rate",
    bpb: "bits per byte",
    grad: "gradient",
    param: "parameter",
  };
  const words = (name) =>
    name
      .replace(/^(train|eval)\//, "")
      .replaceAll(/[^_/]+/g, (word) => ABBREVIATIONS[word] || word)
      .replaceAll("_", " ")
      .replaceAll("/", " · ")
      .replaceAll(/\b(lm|q|mse|kl|ce|mmcs|ml2r)\b/g, (word) => word.toUpperCase());

  // ---- axes

  // Places of round numbers between two ends, about `count` of them.
  function ticks(low, high, count, { log, whole, unit } = {}) {
    if (log && high >= 10 * low) {
      const every = Math.ceil(Math.log10(high / low) / count);
      const powers = [];
      for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += every)
        powers.push(10 ** power, ...(high < 100 * low ? [3 * 10 ** power] : []));
      return powers.filter((value) => value >= low && value <= high);
    }
    const base =
      unit === "bytes" ? 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)) : 1;
    const rough = (high - low) / base / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= 0.999 * rough);
    if (whole) step = Math.max(1, step);
    const [first, last] = [
      Math.ceil(low / base / step - 1e-9),
      Math.floor(high / base / step + 1e-9),
    ];
    const places = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step * base);
    return places.map((value) => Number(value.toPrecision(12)));
  }
  // Labels with as few digits as show all values exactly.
  function labels(values) {
    const isExact = (digits) => (value) =>
      Math.abs(Number(value.toPrecision(digits)) - value) <= 1e-9 * Math.abs(value);
    const digits = [2, 3, 4, 5, 6, 8].find((most) => values.every(isExact(most))) || 12;
    return values.map((value) => short(value, digits));
  }

  // Places values between two pixels, with a share `room` of space beyond them, but none beyond
  // `bounds` that all values keep.
  function scale(values, from, to, { log, room = 0, bounds = [] } = {}) {
    const go = log ? Math.log10 : Number;
    const back = log ? (value) => 10 ** value : Number;
    const [least, most] = [Math.min(...values.map(go)), Math.max(...values.map(go))];
    let [low, high] = least > most ? [0, 1] : [least, most];
    if (low === high) {
      const half = log ? 0.3 : Math.abs(low) / 2;
      [low, high] = half ? [low - half, high + half] : [0, 1];
    }
    const more = room * (high - low);
    low = bounds[0] <= least ? Math.max(bounds[0], low - more) : low - more;
    high = bounds[1] >= most ? Math.min(bounds[1], high + more) : high + more;
    const at = (value) => from + ((go(value) - low) / (high - low)) * (to - from);
    const value = (pixel) => back(low + ((pixel - from) / (to - from)) * (high - low));
    return { low: back(low), high: back(high), at, value };
  }
  const nearest = (values, x) =>
    values.reduce(
      (best, value, i) => (Math.abs(value - x) < Math.abs(values[best] - x) ? i : best),
      0,
    );

  // ---- charts

  // Calls `draw` with the width whenever that changes; returns the place, and what draws again.
  function responsive(draw) {
    const holder = el("div", { class: "holder" });
    let width = 0;
    const redraw = () => width && holder.replaceChildren(draw(width));
    new ResizeObserver(() => {
      const now = Math.floor(holder.clientWidth);
      if (!now || now === width) return;
      width = now;
      redraw();
    }).observe(holder);
    return [holder, redraw];
  }

  // Draws curves. `make` returns {title, series, height, log, unit, least, most, whole, xLabel,
  // xText, xTicks, room, diverging, marks, expected}. A series is {key, name, color, dashed, x, y,
  // raw, low, high, dots, loose, base, values}: `y` is the curve, `raw` is thin behind it, `low`
  // and `high` are its spread, `loose` points are not joined, bars begin at `base` and show
  // `values`, and null is a gap. A click on a name in the legend hides its series.
  function chart(make, named = true) {
    const tip = el("div", { class: "tip", hidden: true, role: "status" });
    const [holder, redraw] = responsive((width) => plot(make(), width, tip));
    charts.push(redraw);
    const { series } = make();
    return el("div", { class: "chart" }, named && series.length > 1 && legend(series), holder, tip);
  }

  function legend(series) {
    const isHidden = (one) => view.hidden.includes(one.key);
    const buttons = series.map((one) => {
      const button = el(
        "button",
        {
          type: "button",
          "aria-pressed": String(!isHidden(one)),
          title: "Show or hide",
          onclick: () => {
            const others = view.hidden.filter((key) => key !== one.key);
            change({ hidden: isHidden(one) ? others : [...others, one.key] });
            button.setAttribute("aria-pressed", String(!isHidden(one)));
          },
        },
        swatch(one.color, one.dashed),
        one.name,
      );
      return button;
    });
    return el("div", { class: "legend" }, buttons);
  }

  function plot(options, width, tip) {
    const {
      log,
      unit = "",
      height = 200,
      whole,
      diverging,
      expected = [],
      marks = [],
      title,
    } = options;
    const series = options.series.filter((one) => !view.hidden.includes(one.key));
    const isDrawn = (y) => y !== null && y !== undefined && !(log && y <= 0);
    const values = series.flatMap((one) =>
      [one.y, one.raw, one.low, one.high, one.base].flatMap((of) => of || []),
    );
    const ends = [
      options.least,
      options.most,
      ...expected.flatMap((each) => [each.low, each.high]),
    ];
    const bounds = log ? [] : unit === "%" ? [0, 1] : [options.least];
    const bottom = height - (options.xLabel ? 40 : 24);
    const y = scale([...values, ...ends].filter(isDrawn), bottom, 10, { log, room: 0.05, bounds });
    const yTicks = ticks(y.low, y.high, height / 44, { log, unit });
    const isPlain = unit === "" || unit === "ms";
    const texts = isPlain
      ? labels(diverging ? yTicks.map(Math.abs) : yTicks)
      : yTicks.map(UNITS[unit]);
    const left = Math.max(52, 14 + 7 * Math.max(0, ...texts.map((text) => text.length)));
    const right = width - 14;
    const x = scale(
      series.flatMap((one) => one.x),
      left,
      right,
      { room: options.room },
    );
    const xTicks = options.xTicks || ticks(x.low, x.high, width / 80, { whole });
    const xText = options.xText || ((value) => short(value));
    const root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": `${title}; left and right arrows move along the curve`,
    });
    const line = (name, x1, y1, x2, y2) => svg("line", { class: name, x1, y1, x2, y2 });
    yTicks.forEach((value, i) =>
      root.append(
        line("rule", left, y.at(value), right, y.at(value)),
        svg("text", { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, texts[i]),
      ),
    );
    root.append(line("base", left, bottom, right, bottom));
    for (const value of xTicks)
      root.append(
        svg("text", { x: x.at(value), y: bottom + 17, "text-anchor": "middle" }, xText(value)),
      );
    if (options.xLabel)
      root.append(svg("text", { x: right, y: bottom + 34, "text-anchor": "end" }, options.xLabel));

    for (const each of expected) {
      const [at, low, high] = [x.at(each.x), y.at(each.low), y.at(each.high)];
      const d = `M${at} ${low}V${high}M${at - 5} ${low}h10M${at - 5} ${high}h10`;
      root.append(svg("path", { class: "expected", d }, svg("title", {}, each.text)));
    }
    for (const one of series) {
      const point = (i, ys) => `${x.at(one.x[i]).toFixed(1)} ${y.at(ys[i]).toFixed(1)}`;
      const path = (ys) =>
        one.x
          .map((_, i) =>
            isDrawn(ys[i]) ? `${i && isDrawn(ys[i - 1]) ? "L" : "M"}${point(i, ys)}` : "",
          )
          .join("");
      if (one.low) {
        const there = [...one.x.keys()].filter((i) => isDrawn(one.low[i]) && isDrawn(one.high[i]));
        const around = [
          ...there.map((i) => point(i, one.high)),
          ...there.reverse().map((i) => point(i, one.low)),
        ];
        const d = around.length ? `M${around.join("L")}Z` : "";
        root.append(svg("path", { class: "spread", d, style: `fill:${one.color}` }));
      }
      const stroke = { style: `stroke:${one.color}`, "stroke-dasharray": one.dashed && "5 4" };
      if (one.raw) root.append(svg("path", { class: "raw", d: path(one.raw), ...stroke }));
      const known = [...one.x.keys()].filter((i) => isDrawn(one.y[i]));
      if (one.base) {
        const wide = Math.min(46, (0.72 * (right - left)) / one.x.length);
        for (const i of known) {
          const [top, low] = [one.y[i], one.base[i]].map(y.at).sort((a, b) => a - b);
          const box = { x: x.at(one.x[i]) - wide / 2, y: top, width: wide, height: low - top };
          root.append(
            svg("rect", {
              class: `column${one.dashed ? " dashed" : ""}`,
              ...box,
              style: `fill:${one.color};stroke:${one.color}`,
            }),
          );
        }
      } else if (!one.loose)
        root.append(svg("path", { class: "curve", d: path(one.y), ...stroke }));
      if (one.dots || (known.length === 1 && !one.base))
        for (const i of known)
          root.append(
            svg("circle", {
              cx: x.at(one.x[i]),
              cy: y.at(one.y[i]),
              r: 3,
              style: `fill:${one.color}`,
            }),
          );
    }
    drawMarks(root, marks, x, bottom);

    const cross = svg("line", { class: "cross", y1: 10, y2: bottom, visibility: "hidden" });
    root.append(cross);
    const every = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    let place = every.length - 1;
    const show = (i) => {
      place = Math.max(0, Math.min(every.length - 1, i));
      const pixel = x.at(every[place]);
      const rows = series.flatMap((one) => {
        const i = nearest(one.x, every[place]);
        if (!isDrawn(one.y[i]) || Math.abs(x.at(one.x[i]) - pixel) > width / 50) return [];
        const key = el("span", { class: "key" }, swatch(one.color, one.dashed), one.name);
        return [el("div", {}, key, UNITS[unit]((one.values || one.y)[i]))];
      });
      const happened = marks.filter((mark) => Math.abs(x.at(mark.x) - pixel) < 8);
      tip.replaceChildren(
        el("b", {}, `${options.xLabel || ""} ${(options.xText || format)(every[place])}`),
        ...rows,
        ...happened.map((mark) => el("div", { class: "key" }, mark.text)),
      );
      tip.hidden = false;
      const beside =
        pixel + 14 + tip.offsetWidth > width ? pixel - 14 - tip.offsetWidth : pixel + 14;
      tip.style.transform = `translate(${Math.max(0, beside)}px, 10px)`;
      fill(cross, { x1: pixel, x2: pixel, visibility: "visible" }, []);
    };
    const hide = () => {
      tip.hidden = true;
      cross.setAttribute("visibility", "hidden");
    };
    if (!every.length) return root;
    root.addEventListener("pointermove", (event) => {
      const frame = root.getBoundingClientRect();
      show(nearest(every, x.value(((event.clientX - frame.left) / frame.width) * width)));
    });
    for (const leaving of ["pointerleave", "blur"]) root.addEventListener(leaving, hide);
    root.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      show(tip.hidden ? every.length - 1 : place + step);
    });
    return root;
  }
  const STEPS = {
    ArrowLeft: -1,
    ArrowUp: -1,
    ArrowRight: 1,
    ArrowDown: 1,
    PageUp: -10,
    PageDown: 10,
    Home: -1e9,
    End: 1e9,
  };

  // Marks differ in shape, not in colour alone.
  const MARKS = {
    checkpoint: ["M0 0l-4 7h8z", "clue", true, "checkpoint"],
    restart: ["M0 -1v9M-4.5 3.5h9", "accent", false, "restart"],
    ranks: ["M-3.5 0h7v7h-7z", "c4", true, "other number of ranks"],
    skipped: ["M-3 0l6 7M3 0l-6 7", "bad", false, "skipped step"],
    signal: ["M1.5 -1l-4 5h5l-4 5", "changed", false, "asked to stop"],
    failed: ["M0 -1l4.5 4.5l-4.5 4.5l-4.5 -4.5z", "bad", true, "failure"],
  };
  function markShape(kind, transform) {
    const [d, color, isFilled] = MARKS[kind];
    const fill = isFilled ? `var(--${color})` : "none";
    const style = `fill:${fill};stroke:var(--${color});stroke-width:1.5`;
    return svg("path", { d, transform, style });
  }
  function drawMarks(root, marks, x, bottom) {
    const heights = {};
    for (const mark of marks) {
      const at = x.at(Math.max(x.low, Math.min(x.high, mark.x)));
      const height = (heights[Math.round(at / 6)] = (heights[Math.round(at / 6)] || 0) + 1);
      const up = bottom + 3 - 11 * Math.min(height, 6);
      const shape = markShape(mark.kind, `translate(${at.toFixed(1)} ${up})`);
      shape.append(svg("title", {}, mark.text));
      root.append(shape);
    }
  }

  // ---- head

  const STATES = {
    finished: "good",
    failed: "bad",
    lost: "bad",
    running: "live",
    stopped: "held",
    requeue: "held",
  };
  const SAID = { lost: "not heard from", requeue: "to be started again", "": "unknown" };
  const pill = (state = "") =>
    el(
      "span",
      { class: `state ${STATES[state] || ""}` },
      el("i", { class: "dot" }),
      SAID[state || ""] || state,
    );

  function figure(label, value, notes, first) {
    return el(
      "div",
      { class: `number${first ? " first" : ""}` },
      el("div", { class: "label" }, label),
      el("div", { class: "value" }, value),
      notes
        .filter(Boolean)
        .map((note) => (note instanceof Node ? note : el("div", { class: "note" }, note))),
    );
  }

  const lengthOf = (run) => run.started.total_steps || run.step || 0;
  function headlineFigure(run) {
    const { headline, expected, status } = run;
    if (!headline) return null;
    const label = `Held-out ${words(headline.name)}`;
    const isRunning = status.state === "running";
    if (headline.last === null)
      return figure(label, "–", [`not evaluated${isRunning ? " yet" : ""}`], true);
    const { last, step, best, best_step, low, high, n } = headline;
    const show = textOf(headline.unit);
    const known = low !== null && high !== null;
    const interval =
      known &&
      `95 % interval ${show(low)} to ${show(high)}${n ? `, n\u00a0=\u00a0${format(n)}` : ""}`;
    const other =
      best === last
        ? `the best ${isRunning ? "so far" : "of the run"}`
        : `best ${show(best)} after step\u00a0${format(best_step)}`;
    const when = `after step\u00a0${format(step)}, ${other}`;
    return figure(
      label,
      show(last),
      [expected && verdict(expected, lengthOf(run)), interval, when],
      true,
    );
  }
  function verdict({ unit, measured, verdict, points }, end) {
    const point = measured || points.find((each) => each.step <= end);
    if (!point) return null;
    const bounds = [point.low, point.high].map(textOf(unit)).join(" to ");
    const range = `${bounds} expected at step\u00a0${format(point.step)}`;
    if (!measured) return el("div", { class: "verdict" }, range);
    const isFine = verdict === "on track";
    const said = el("b", {}, isFine ? "✓ On track" : "▼ Below expectation");
    return el(
      "div",
      { class: `verdict ${isFine ? "good-text" : "bad-text"}` },
      said,
      el("span", {}, ` · ${range}`),
    );
  }

  function numbers(run) {
    const total = run.started.total_steps;
    const step = run.step;
    const { examples_per_s, tokens_per_s, step_ms } = run.speed;
    const share = `${Math.min(100, (100 * (step || 0)) / total).toFixed(1)}%`;
    const meter =
      total > 0 &&
      el(
        "div",
        { class: "meter", role: "img", "aria-label": `${share} done` },
        el("i", { style: `width:${share}` }),
      );
    const left = run.status.state === "running" && step_ms && total > step;
    const starts = run.timeline.filter((event) =>
      ["started", "restart", "ranks"].includes(event.kind),
    );
    return el(
      "div",
      { class: "numbers" },
      headlineFigure(run),
      figure(
        "Steps",
        [format(step), total && el("small", {}, ` of ${format(total)}`)],
        [meter, left && `about ${duration(((total - step) * step_ms) / 1000)} of training left`],
      ),
      figure("Time", duration(run.seconds), [
        starts.length > 0 && `began ${day(starts[0].time)}`,
        starts.length > 1 && `${starts.length} starts`,
      ]),
      figure(
        "Speed",
        examples_per_s ? [short(examples_per_s), el("small", {}, " examples/s")] : "–",
        [
          step_ms && `${format(step_ms)} ms a step, median`,
          tokens_per_s && `${short(tokens_per_s)} tokens/s`,
        ],
      ),
    );
  }

  function facts(run) {
    const { started, code: version } = run;
    const list = el("dl", { class: "facts" });
    const add = (name, ...value) =>
      list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    const command = (text, what) =>
      el("span", { class: "command" }, code(text), copyButton(text, what));
    if (started.ranks) {
      const hosts = [started.hosts].flat().join(", ");
      const threads = `${plural(started.threads, "thread")} of ${format(started.cores)}`;
      add("Ran on", `${plural(started.ranks, "rank")} on ${hosts}: ${started.device}, ${threads}`);
    }
    if (started.torch) add("Versions", `PyTorch ${started.torch}, Python ${started.python || "–"}`);
    if (version.revision) {
      const changed = version.changed && ", with changes that are not committed (uncommitted.diff)";
      add(
        "Code",
        code(version.revision, version.revision.slice(0, 10)),
        ` on ${version.branch}`,
        changed,
      );
    }
    if (started.fingerprint)
      add(
        "Data",
        `${started.data || ""} `,
        code(started.fingerprint, started.fingerprint.slice(0, 16)),
      );
    const last = run.digests.findLast((each) => each.digest);
    if (last)
      add(
        "Digest",
        code(last.digest, last.digest.slice(0, 16)),
        ` of step ${format(last.step)} `,
        copyButton(last.digest, "the digest"),
      );
    add("Directory", code(run.directory));
    if (run.command) {
      const ends = ["finished", "running"].includes(run.status.state);
      const checkout = version.revision ? `git checkout ${version.revision.slice(0, 10)} && ` : "";
      add(ends ? "Command" : "To continue", command(run.command, "the command"));
      add(
        "To reproduce",
        command(`${checkout}${run.command} resume=false`, "the command to reproduce"),
      );
    }
    return list;
  }

  function head(run) {
    const { started, status } = run;
    const model = (run.config["arch._target_"] || "").split(".").pop();
    const parameters = started.parameters && `${format(started.parameters)} parameters`;
    const about = [model, parameters, started.data, started.dtype].filter(Boolean).join(" · ");
    const asOf =
      status.state === "running" && el("span", { class: "over" }, `as of ${day(payload.made)}`);
    return el(
      "header",
      {},
      el("p", { class: "over" }, run.project),
      el("div", { class: "title" }, el("h1", {}, run.name), pill(status.state), asOf),
      el("p", { class: "subtitle" }, about),
      status.reason && el("p", { class: `reason ${STATES[status.state] || ""}` }, status.reason),
      numbers(run),
      facts(run),
    );
  }

  // The interval of a mean over seeds.
  const overSeeds = ({ low, high, n }, show) =>
    [low !== null && `95 % interval ${show(low)} to ${show(high)}`, plural(n, "seed")]
      .filter(Boolean)
      .join(", ");

  function headOfSeveral() {
    const names = runs.map((run) => run.name);
    const only = runs.length === 2 && runs[1].comparison;
    const result = ({ comparison }) => {
      if (!comparison) return "–";
      const { same, step, text } = comparison;
      if (same === null) return "nothing in common";
      return el(
        "span",
        { class: same ? "good-text" : "bad-text", title: text },
        same ? "✓ same" : `✕ differs from step ${format(step)} on`,
      );
    };
    const judged = runs[0].headline?.name;
    const value = ({ headline }, key) =>
      headline && headline.name === judged ? textOf(headline.unit)(headline[key]) : "–";
    const last = (run) =>
      run.seeds && run.headline?.name === judged
        ? `${value(run, "last")}, ${overSeeds(run.headline, textOf(run.headline.unit))}`
        : value(run, "last");
    const titles = [
      "Run",
      "State",
      `Last ${words(judged || "metric")}`,
      "Best",
      "Steps",
      "Time",
      "Ran on",
      "Against the first",
      "Directory",
    ];
    const rows = runs.map((run) => [
      el("span", {}, swatch(run.color), run.name),
      pill(run.status.state),
      last(run),
      value(run, "best"),
      format(run.step),
      duration(run.seconds),
      run.started.ranks ? `${plural(run.started.ranks, "rank")}, ${run.started.device}` : "–",
      result(run),
      code(run.directory),
    ]);
    const title =
      names.join(", ").length <= 60
        ? names.join(", ")
        : `${names[0]} and ${plural(names.length - 1, "other")}`;
    return el(
      "header",
      {},
      el("p", { class: "over" }, `${names.length} runs`),
      el("h1", {}, title),
      payload.difference && el("p", { class: "answer" }, payload.difference),
      only &&
        el(
          "p",
          { class: `answer ${only.same ? "good" : only.same === false ? "bad" : ""}` },
          only.text,
        ),
      table(titles, rows, "runs"),
    );
  }

  // ---- curves

  const COLORS = [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `var(--c${n})`);
  const MOST_SERIES = 24; // in a chart of several runs
  const SMOOTHED = 20; // points from which a training curve is smoothed

  const longest = Math.max(0, ...runs.map((run) => run.seconds));
  const timeUnit = longest < 180 ? [1, "s"] : longest < 7200 ? [60, "min"] : [3600, "h"];
  function places(run, steps, seconds) {
    if (view.axis === "seconds") return seconds.map((each) => (each || 0) / timeUnit[0]);
    return view.axis === "step"
      ? steps
      : steps.map((step) => step * (run.started.examples_per_step || 1));
  }
  const axisLabel = () => (view.axis === "seconds" ? `time in ${timeUnit[1]}` : view.axis);

  function smoothed(values) {
    let [sum, total] = [0, 0];
    return values.map((value) => {
      if (value === null) return null;
      sum = view.smooth * sum + (1 - view.smooth) * value;
      total = view.smooth * total + (1 - view.smooth);
      return sum / total;
    });
  }
  const isSmooth = (run, { kind, name }) =>
    kind === "train" &&
    name.startsWith("train/") &&
    name !== "train/lr" &&
    run.train.step.length > SMOOTHED;

  function seriesOf({ title, lines }) {
    const alike = lines.every((line) => line.kind === lines[0].kind);
    return runs.flatMap((run) =>
      lines.flatMap((line, i) => {
        const rows = run[line.kind];
        const curve = rows.curves[line.name];
        if (!curve) return [];
        const kind = line.kind === "train" ? "training" : "held out";
        const label = alike
          ? line.label || words(title)
          : [kind, line.label].filter(Boolean).join(" · ");
        const smooth = view.smooth > 0 && isSmooth(run, line);
        const ends = ["low", "high"].map((end) => rows.curves[`${line.name}_${end}`]?.mean);
        const spread = [curve.min, curve.max].map((end) => (end && smooth ? smoothed(end) : end));
        const ofOne = ends[0] ? ends : [curve.min, curve.max];
        const [low, high] = several ? [] : ofOne;
        return {
          key: several ? run.name : `${title} ${label}`,
          name: several ? `${run.name} · ${label}` : label,
          color: several ? run.color : COLORS[i % 8],
          dashed: several ? line.kind === "train" : i >= 8,
          x: places(run, rows.step, rows.seconds),
          y: smooth ? smoothed(curve.mean) : curve.mean,
          raw: smooth && !run.seeds && curve.mean,
          low: run.seeds ? spread[0] : low,
          high: run.seeds ? spread[1] : high,
          dots: line.kind === "eval" && rows.step.length <= 60,
        };
      }),
    );
  }

  // What happened, on the axis. Several runs have too many checkpoints.
  const marks = () =>
    runs.flatMap((run) =>
      run.timeline
        .filter(({ kind }) => MARKS[kind] && !(several && kind === "checkpoint"))
        .map((event) => ({
          kind: event.kind,
          x: places(run, [event.step], [event.seconds])[0],
          text: `${several ? `${run.name}: ` : ""}step ${format(event.step)}: ${event.text}`,
        })),
    );

  function expectedOn(lines) {
    const { expected } = runs[0];
    if (!expected || view.axis === "seconds" || !lines.some((line) => line.name === expected.name))
      return [];
    return expected.points
      .filter((point) => point.step <= lengthOf(runs[0]))
      .map((point) => ({
        ...point,
        x: places(runs[0], [point.step])[0],
        text: `expected: ${[point.low, point.high].map(textOf(expected.unit)).join(" to ")}`,
      }));
  }

  function chartPanel(group, log = false) {
    const make = () => {
      const series = seriesOf(group);
      return {
        ...group,
        series,
        height: group.wide ? 300 : 190,
        log: log && view.log,
        whole: view.axis !== "seconds",
        xLabel: axisLabel(),
        marks: marks(),
        expected: expectedOn(group.lines),
      };
    };
    const kind = group.lines[0].kind === "train" ? "training" : "held out";
    const key = log && !several && group.lines.length === 1 && el("span", { class: "over" }, kind);
    const names = group.lines.map((line) => line.name).join(", ");
    const title = el("h3", { title: names }, words(group.title));
    return el(
      "div",
      { class: `panel${group.wide ? " wide" : ""}` },
      el("div", { class: "heading" }, title, key),
      chart(make, !several),
    );
  }

  function segments(label, choices, chosen, choose) {
    const buttons = choices.map(([value, text]) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(value === chosen),
          onclick: (event) => {
            for (const other of buttons)
              other.setAttribute("aria-pressed", String(other === event.currentTarget));
            choose(value);
          },
        },
        text,
      ),
    );
    return el("span", { class: "segments", role: "group", "aria-label": label }, buttons);
  }

  function curvesSection() {
    const fits = (group) =>
      group.wide || !several || group.lines.length * runs.length <= MOST_SERIES;
    const groups = payload.charts.curves.filter(fits);
    if (!groups.length)
      return section(
        "curves",
        "Curves",
        "",
        el("p", { class: "empty" }, "No metrics have been logged yet."),
      );
    const out = el("output", {}, view.smooth.toFixed(2));
    const slider = el("input", {
      type: "range",
      min: 0,
      max: 0.98,
      step: 0.02,
      value: view.smooth,
      "aria-label": "Smoothing of training curves",
      oninput: (event) => {
        change({ smooth: Number(event.target.value) });
        out.textContent = view.smooth.toFixed(2);
      },
    });
    const canSmooth = runs.some((run) =>
      groups.some((group) => group.lines.some((line) => isSmooth(run, line))),
    );
    const axes = [
      ["step", "Steps"],
      ["examples", "Examples"],
      ["seconds", "Wall clock"],
    ];
    const scales = [
      [false, "Linear"],
      [true, "Log"],
    ];
    const kinds = [...new Set(marks().map((mark) => mark.kind))];
    const icon = (kind) =>
      svg(
        "svg",
        { width: 12, height: 12, viewBox: "-6 -3 12 13", "aria-hidden": "true" },
        markShape(kind),
      );
    const controls = el(
      "div",
      { class: "controls" },
      segments("Horizontal axis", axes, view.axis, (axis) => change({ axis })),
      segments("Vertical axis", scales, view.log, (log) => change({ log })),
      canSmooth && el("label", {}, "Smoothing", slider, out),
      kinds.length > 0 &&
        el(
          "div",
          { class: "legend marks" },
          kinds.map((kind) => el("span", {}, icon(kind), MARKS[kind][3])),
        ),
    );
    const styles = [
      el("span", {}, swatch("var(--muted)"), "held out"),
      el("span", {}, swatch("var(--muted)", true), "training"),
    ];
    const names = legend(runs.map((run) => ({ key: run.name, name: run.name, color: run.color })));
    const rest = payload.charts.curves
      .filter((group) => !fits(group))
      .map((group) => words(group.title));
    return section(
      "curves",
      sweep ? "Curves of the best jobs" : "Curves",
      runs.some((run) => run.seeds) && "Means over seeds, in a band from the lowest to the highest.",
      controls,
      several && el("div", { class: "of-runs" }, names, el("div", { class: "legend" }, styles)),
      el(
        "div",
        { class: "grid" },
        groups.map((group) => chartPanel(group, true)),
      ),
      rest.length > 0 &&
        el("p", { class: "about after" }, `Too many curves to show: ${rest.join(", ")}.`),
    );
  }

  // ---- speed

  const SPENT = [
    ["compute", "Computing", "var(--c1)"],
    ["data_wait", "Waiting for data", "var(--c5)"],
    ["all_reduce", "Waiting for other ranks", "var(--c4)"],
    ["checkpoint", "Held up by checkpoints", "var(--c2)"],
    ["evaluation", "Evaluating", "var(--c3)"],
  ];
  function spentBar(run) {
    const known = SPENT.map(([key, text, color]) => ({ text, color, seconds: run.spent[key] }));
    const sum = known.reduce((total, part) => total + part.seconds, 0);
    if (!sum) return null;
    const rest = {
      text: "Starting and all else",
      color: "var(--line)",
      seconds: run.seconds - sum,
    };
    const parts = [...known, rest].filter((part) => part.seconds > 0.001 * sum);
    const total = parts.reduce((all, part) => all + part.seconds, 0);
    const share = (part) => `${Number(((100 * part.seconds) / total).toPrecision(2))} %`;
    const bar = parts.map((part) =>
      el("i", { style: `flex-grow:${part.seconds / total};background:${part.color}` }),
    );
    const keys = parts.map((part) =>
      el(
        "span",
        {},
        el("i", { class: "square", style: `background:${part.color}` }),
        `${part.text} `,
        el("b", {}, share(part)),
        ` ${duration(part.seconds)}`,
      ),
    );
    return el(
      "div",
      { class: "panel wide" },
      heading(
        `Where the time went${several ? ` · ${run.name}` : ""}`,
        el("span", { class: "over" }, duration(total)),
      ),
      el("div", { class: "stack", "aria-hidden": "true" }, bar),
      el("div", { class: "legend large" }, keys),
    );
  }
  function speedSection() {
    const groups = payload.charts.speed;
    if (!groups.length) return null;
    // of several runs the whole step is enough
    const shown = groups.map((group) =>
      several && group.unit === "ms" ? { ...group, lines: group.lines.slice(0, 1) } : group,
    );
    return section(
      "speed",
      "Speed",
      "",
      el(
        "div",
        { class: "grid" },
        runs.map(spentBar),
        shown.map((group) => chartPanel(group)),
      ),
    );
  }

  // ---- the model at work

  function scenesSection(run) {
    const steps = [...new Set(run.scenes.map((each) => each.step))];
    if (!steps.length) return null;
    const holder = el("div", { class: "scenes" });
    const show = (step) =>
      holder.replaceChildren(...run.scenes.filter((each) => each.step === step).map(scenePanel));
    const options = steps.map((step) => el("option", { value: step }, format(step)));
    const choice = el("select", { onchange: (event) => show(Number(event.target.value)) }, options);
    show(steps[0]);
    const isOne = steps.length === 1;
    return section(
      "model",
      "The model at work",
      isOne && `After step ${format(steps[0])}.`,
      !isOne && el("div", { class: "controls" }, el("label", {}, "Evaluation after step", choice)),
      holder,
    );
  }
  function scenePanel({ scene, name, set }) {
    const about = scene.caption && el("p", { class: "scene-caption" }, scene.caption);
    const draw = Object.hasOwn(scenes, scene.kind)
      ? scenes[scene.kind]
      : () => el("p", { class: "over" }, `This page cannot draw figures of the kind “${scene.kind}”.`);
    const title = heading(String(scene.title || words(name)), el("span", { class: "over" }, set));
    return el("div", { class: "panel scene" }, title, about, attempt(draw, scene));
  }

  // ---- what happened, and what is the same

  function timelineSection() {
    const happened = runs
      .flatMap((run) =>
        run.timeline
          .filter((event) => event.kind !== "checkpoint")
          .map((event) => ({ run, ...event })),
      )
      .sort((a, b) => a.time - b.time);
    if (!happened.length) return null;
    const rows = happened.map(({ run, time, seconds, step, text }) => [
      ...(several ? [el("span", {}, swatch(run.color), run.name)] : []),
      day(time),
      format(step),
      el("span", { class: "text" }, text),
      duration(seconds),
    ]);
    const titles = [...(several ? ["Run"] : []), "When", "Step", "What happened", "After"];
    return section("timeline", "Timeline", "", panel(table(titles, rows, "timeline")));
  }

  function digestsSection(run) {
    if (!run.digests.length) return null;
    const rest = run.exact
      ? "The run is exact: any number of ranks gives these digests."
      : "With exact=true any number of ranks gives the same.";
    const about = `One sha256 over all tensors of each checkpoint. ${rest}`;
    const later = el("span", { class: "over" }, "python -m utils.checkpoint digest computes it");
    const rows = run.digests
      .toReversed()
      .map((each) => [
        format(each.step),
        each.digest
          ? el(
              "span",
              { class: "command" },
              el("code", { class: "digest" }, each.digest),
              copyButton(each.digest, `the digest of step ${each.step}`),
            )
          : later,
        bytes(each.bytes),
        day(each.time),
        each.gone ? el("span", { class: "over" }, "deleted") : "kept",
      ]);
    return section(
      "same",
      "Same run",
      about,
      panel(table(["Step", "Digest", "Size", "Written", "Checkpoint"], rows, "digests")),
    );
  }

  function comparedSection() {
    const compared = runs.filter((run) => run.comparison && run.comparison.same !== null);
    const parts = compared.map((run) => {
      const { checkpoints, tensors, text } = run.comparison;
      const digest = (value) => (value ? code(value, value.slice(0, 12)) : "–");
      const mark = (same) =>
        el("span", { class: same ? "good-text" : "bad-text" }, same ? "✓ same" : "✕ differs");
      const rows = checkpoints.map((each) => [
        format(each.step),
        mark(each.same),
        ...each.digests.map(digest),
        el("span", { class: "text" }, each.what),
      ]);
      const differing = (tensors || []).map((each) => [
        code(each.name),
        each.why || each.shape.join(" × ") || "scalar",
        format(each.largest),
        each.of ? `${format(each.count)} of ${format(each.of)}` : "–",
      ]);
      return panel(
        heading(`Comparison of ${runs[0].name} and ${run.name}`),
        runs.length > 2 && el("p", { class: "over" }, text),
        rows.length > 0 &&
          table(
            ["Step", "Result", `Digest · ${runs[0].name}`, `Digest · ${run.name}`, "Compared"],
            rows,
            "checkpoints",
          ),
        differing.length > 0 &&
          table(
            ["Tensor", "Shape", "Largest difference", "Values that differ"],
            differing,
            "tensors",
          ),
      );
    });
    return parts.length
      ? section("same", "Same run", "", el("div", { class: "stacked" }, parts))
      : null;
  }

  // ---- details

  function detailsSection(run) {
    const keys = Object.entries(run.config);
    const link = (path) =>
      el("a", { href: path.split("/").map(encodeURIComponent).join("/") }, path);
    const parts = [
      keys.length &&
        details(
          "Configuration",
          plural(keys.length, "key"),
          table(
            ["Key", "Value"],
            keys.map((pair) => pair.map((text) => code(text))),
          ),
        ),
      run.log.length &&
        details(
          "Log",
          `last ${plural(run.log.length, "line")}`,
          el("pre", { class: "log", tabindex: 0 }, run.log.join("\n")),
        ),
      run.files.length &&
        details(
          "Files of evaluations",
          run.files.length,
          table(
            ["File", "Size"],
            run.files.map((file) => [link(file.path), bytes(file.bytes)]),
          ),
        ),
    ];
    return parts.some(Boolean)
      ? section(
          "details",
          "Details",
          "",
          el(
            "div",
            { class: "stacked" },
            parts.map((part) => part || null),
          ),
        )
      : null;
  }

  function differencesSection() {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter(
      (key) => key !== "checkpoint_path" && new Set(runs.map((run) => run.config[key])).size > 1,
    );
    const rows = keys.map((key) => [code(key), ...runs.map((run) => code(run.config[key] ?? "–"))]);
    const shown = keys.length
      ? table(["Key", ...runs.map((run) => run.name)], rows)
      : el("p", { class: "over" }, "None but the directory.");
    return section("configuration", "Keys that differ", "", panel(shown));
  }

  // ---- sweeps

  function sweepHead() {
    const best = sweep.settings.find((setting) => setting.mean !== null);
    const show = textOf(sweep.unit);
    const named = ({ jobs, keys }) => {
      const pairs = Object.entries(keys).map((pair) => pair.join("="));
      return `job${jobs.length > 1 ? "s" : ""} ${[jobs.join(", "), ...pairs].join(" · ")}`;
    };
    const states = sweep.jobs.reduce(
      (sum, { state }) => ({ ...sum, [state]: (sum[state] || 0) + 1 }),
      {},
    );
    const counts = Object.entries(states)
      .map(([state, count]) => `${count} ${state}`)
      .join(", ");
    const seconds = sweep.jobs.reduce((sum, job) => sum + (job.seconds || 0), 0);
    return el(
      "header",
      {},
      el("p", { class: "over" }, "Sweep"),
      el("h1", {}, sweep.name),
      el("p", { class: "subtitle" }, sweep.directory),
      el(
        "div",
        { class: "numbers" },
        best &&
          figure(
            `Best ${words(sweep.metric)}`,
            show(best.mean),
            [named(best), best.n > 1 && overSeeds(best, show)],
            true,
          ),
        figure("Jobs", format(sweep.jobs.length), [counts]),
        figure("Time", duration(seconds), ["of training, all jobs together"]),
      ),
    );
  }

  // Jobs that differ in their seed alone.
  function settingsSection() {
    if (!sweep.settings.some((setting) => setting.n > 1)) return null;
    const show = textOf(sweep.unit);
    const keys = sweep.keys.filter((key) => key !== "seed");
    const rows = sweep.settings.map((setting) => [
      ...keys.map((key) => setting.keys[key] ?? "–"),
      ...["mean", "low", "high", "best", "worst"].map((name) => show(setting[name] ?? NaN)),
      format(setting.n),
      setting.jobs.join(", "),
    ]);
    const titles = ["Mean", "95 % interval from", "to", "Best", "Worst", "Seeds", "Jobs"];
    const about = `${words(sweep.metric)}; the interval is that of the mean by Student's t.`;
    return section(
      "settings",
      "Over seeds",
      about,
      payload.difference && el("p", {}, payload.difference),
      panel(table([...keys, ...titles], rows, "settings")),
    );
  }

  function jobsSection() {
    const show = textOf(sweep.unit);
    const columns = [
      ["Job", (job) => job.number],
      ...sweep.keys.map((key) => [key, (job) => job.keys[key]]),
      ["State", (job) => job.state, pill],
      [words(sweep.metric || "value"), (job) => job.value, show],
      ["Best", (job) => job.best, show],
      ["Steps", (job) => job.step, format],
      ["Time", (job) => job.seconds, duration],
      ["Directory", (job) => job.directory, (text) => code(text)],
    ];
    const ranked = [...sweep.jobs];
    const holder = el("div", {});
    let [by, down] = [sweep.keys.length + 2, !sweep.lower];
    const draw = () => {
      const [, get] = columns[by];
      const isMissing = (value) => value === null || value === undefined || value === "";
      ranked.sort((a, b) => {
        const [x, y] = [get(a), get(b)];
        if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
        const order = Number.isNaN(x - y) ? String(x).localeCompare(String(y)) : x - y;
        return down ? -order : order;
      });
      const rows = ranked.map((job) =>
        columns.map(([, get, show]) => (show ? show(get(job) ?? NaN) : (get(job) ?? "–"))),
      );
      const titles = columns.map(([title], i) => {
        const choose = () => {
          [by, down] = [i, by === i && !down];
          draw();
          holder.querySelectorAll("th button")[i].focus();
        };
        const arrow = by === i && el("span", { "aria-hidden": "true" }, down ? " ↓" : " ↑");
        return el("button", { type: "button", class: "sort", onclick: choose }, title, arrow);
      });
      holder.replaceChildren(table(titles, rows, "jobs"));
      holder
        .querySelectorAll("th")
        [by].setAttribute("aria-sort", down ? "descending" : "ascending");
    };
    draw();
    return section("jobs", "Jobs", "", panel(holder));
  }

  // The metric against each key: numbers by size, or by their logarithm; words side by side.
  function keysSection() {
    const done = sweep.jobs.filter((job) => job.value !== null);
    if (done.length < 2 || !sweep.keys.length) return null;
    const panels = sweep.keys.map((key) => {
      const texts = done.map((job) => job.keys[key] ?? "–");
      const isNumeric = texts.every((text) => text !== "" && Number.isFinite(Number(text)));
      const known = [...new Set(texts)].sort((a, b) => (isNumeric ? a - b : a.localeCompare(b)));
      const isLog = isNumeric && known[0] > 0 && known.at(-1) / known[0] >= 10;
      const place = (text) =>
        isLog ? Math.log10(text) : isNumeric ? Number(text) : known.indexOf(text);
      const series = done.map((job, i) => ({
        name: `job ${job.number}`,
        color: "var(--c1)",
        dots: true,
        loose: true,
        x: [place(texts[i])],
        y: [job.value],
      }));
      const xText = (x) =>
        isNumeric ? short(isLog ? 10 ** x : x) : known[Math.round(x)].slice(0, 14);
      const xTicks = known.length <= 6 ? known.map(place) : null;
      const room = isNumeric ? 0.05 : 0.5 / Math.max(1, known.length - 1);
      const make = () => ({
        title: `${key} and ${sweep.metric}`,
        series,
        unit: sweep.unit,
        xText,
        xTicks,
        xLabel: key,
        room,
        height: 220,
      });
      return panel(heading(`${words(sweep.metric)} by ${key}`), chart(make, false));
    });
    return section("keys", "Each key", "", el("div", { class: "grid" }, panels));
  }

  // ---- start

  function bar() {
    const root = document.documentElement;
    const button = el("button", { type: "button", class: "theme" });
    const set = (dark) => {
      root.style.colorScheme = dark ? "dark" : "light";
      button.textContent = dark ? "Light" : "Dark";
    };
    const isDark = () => view.dark ?? matchMedia("(prefers-color-scheme: dark)").matches;
    button.addEventListener("click", () => {
      change({ dark: !isDark() });
      set(isDark());
    });
    set(isDark());
    return el("div", { class: "bar" }, el("nav", { "aria-label": "Sections" }, links), button);
  }

  // A run that is not over draws its page again, without disturbing its readers.
  const RELOAD_S = 20;
  function reloadWhenIdle() {
    let used = Date.now();
    for (const kind of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"])
      addEventListener(
        kind,
        () => {
          used = Date.now();
        },
        { passive: true },
      );
    setInterval(() => Date.now() - used >= 1000 * RELOAD_S && location.reload(), 1000);
  }

  function start() {
    runs.forEach((run, i) => {
      run.color = COLORS[i % 8];
    });
    const one = [
      head,
      curvesSection,
      scenesSection,
      speedSection,
      timelineSection,
      digestsSection,
      detailsSection,
    ];
    const more = [
      headOfSeveral,
      comparedSection,
      curvesSection,
      speedSection,
      timelineSection,
      differencesSection,
    ];
    const jobs = [
      sweepHead,
      settingsSection,
      jobsSection,
      keysSection,
      ...(runs.length ? [curvesSection] : []),
    ];
    const parts = (sweep ? jobs : several ? more : one).map((part) => attempt(part, runs[0]));
    const made = el("footer", {}, `Made ${day(payload.made)} from the files of the run directory.`);
    document.getElementById("page").append(bar(), el("main", {}, parts.filter(Boolean)), made);
    if (!sweep && !several && runs[0].status.state === "running") reloadWhenIdle();
  }

  return { el, svg, format, percent, plural, ticks, responsive, chart, scenes, start, STEPS };
})();
