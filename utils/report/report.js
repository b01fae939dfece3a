"use strict";
// The report page. Everything is made with createElement and text nodes, never from strings of markup.
window.lockstepScenes = window.lockstepScenes || {};

const lockstep = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }
  const el = (tag, attributes, ...children) =>
    fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);

  // ---- numbers

  function format(number) {
    if (number === null || number === undefined || !Number.isFinite(number)) return "–";
    const size = Math.abs(number);
    if (size && (size < 1e-3 || size >= 1e9)) return number.toExponential(2).replace("e+", "e");
    if (Number.isInteger(number) || size >= 1000) return Math.round(number).toLocaleString("en-US");
    return String(Number(number.toPrecision(4)));
  }
  function short(number, digits = 3) {
    const size = Math.abs(number);
    if (size >= 1e15) return Number(number.toPrecision(digits)).toExponential().replace("e+", "e");
    for (const [unit, letter] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
      [1e3, "k"],
    ])
      if (size >= unit) return `${Number((number / unit).toPrecision(digits))}${letter}`;
    return size && size < 1e-3
      ? Number(number.toPrecision(digits - 1)).toExponential()
      : String(Number(number.toPrecision(digits)));
  }
  // the labels of ticks, with as many digits as tell all of them exactly
  function shortest(numbers) {
    const step = Math.abs(numbers[1] - numbers[0]) || 0;
    const exact = (digits) => (number) =>
      Math.abs(Number(number.toPrecision(digits)) - number) <= 0.01 * step;
    let digits = 3;
    while (digits < 12 && step && !numbers.every(exact(digits))) digits++;
    return numbers.map((number) => short(number, digits));
  }
  function bytes(number) {
    for (const [unit, letter] of [
      [2 ** 40, "TiB"],
      [2 ** 30, "GiB"],
      [2 ** 20, "MiB"],
      [2 ** 10, "KiB"],
    ])
      if (Math.abs(number) >= unit) return `${Number((number / unit).toPrecision(3))} ${letter}`;
    return `${Math.round(number)} B`;
  }
  function duration(seconds) {
    if (!Number.isFinite(seconds)) return "–";
    const whole = Math.round(seconds),
      s = whole % 60,
      m = Math.floor(whole / 60) % 60,
      h = Math.floor(whole / 3600);
    if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
    if (h) return `${h} h ${String(m).padStart(2, "0")} min`;
    return m
      ? `${m} min ${String(s).padStart(2, "0")} s`
      : seconds < 10
        ? `${Number(seconds.toPrecision(2))} s`
        : `${s} s`;
  }
  const isShare = (name) => /accuracy|share|mfu|recall|exact_match/.test(name);
  const percent = (value) => `${Number((100 * value).toFixed(2))}\u00a0%`;

  function valueOf(name, value) {
    if (value === null || value === undefined) return "–";
    if (isShare(name)) return percent(value);
    if (/bytes/.test(name)) return bytes(value);
    if (/_ms$/.test(name)) return `${format(value)} ms`;
    return format(value);
  }
  const words = (name) =>
    name
      .replace(/^(train|eval|speed|memory)\//, "")
      .replace(/^lr$/, "learning rate")
      .replace(/^bpb$/, "bits per byte")
      .replaceAll("_", " ")
      .replaceAll("/", " · ")
      .replace(/\b(lm|q|mse|kl|ce|ema|mmcs|ml2r)\b/g, (short) => short.toUpperCase());

  // ---- ticks

  function ticks(low, high, count) {
    const span = high - low || Math.abs(high) || 1,
      rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
      found.push(Number((i * step).toPrecision(12)));
    return found;
  }
  const wholeTicks = (low, high, count) => ticks(low, high, count).filter(Number.isInteger);
  function logTicks(low, high) {
    const found = [],
      decades = Math.log10(high / low);
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const n of decades > 3 ? [1] : decades > 1 ? [1, 3] : [1, 2, 3, 5, 7]) {
        const value = Number((n * 10 ** power).toPrecision(12));
        if (value >= low && value <= high) found.push(value);
      }
    return decades > 8 ? found.filter((_, i) => i % Math.ceil(decades / 6) === 0) : found;
  }

  function nearest(sorted, x) {
    let low = 0,
      high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
  }

  // ---- charts

  // options: {title, series: [{name, color, dashed, x, y, raw, low, high, dots}], height, log, xLabel, xFormat, yFormat,
  //           marks: [{x, kind, text}], band: [{from, to, low, high, text}], least, most}
  // `y` is drawn as the curve, `raw` thin behind it, `low` and `high` as a spread; null is a gap.
  function chart(element, options) {
    const holder = el("div", { class: "chart" });
    const tip = el("div", { class: "tip", hidden: true, role: "status" });
    element.append(holder);
    let width = 0;
    const draw = () => {
      holder.replaceChildren(plot(options, width, tip), tip);
    };
    const observer = new ResizeObserver(() => {
      const now = Math.floor(holder.clientWidth);
      if (now && now !== width) {
        width = now;
        draw();
      }
    });
    observer.observe(holder);
    return {
      redraw(more) {
        Object.assign(options, more);
        if (width) draw();
      },
    };
  }

  function extent(options) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    const seen = (value) => {
      if (value === null || value === undefined || (options.log && value <= 0)) return;
      y0 = Math.min(y0, value);
      y1 = Math.max(y1, value);
    };
    for (const one of options.series) {
      for (const x of one.x) {
        x0 = Math.min(x0, x);
        x1 = Math.max(x1, x);
      }
      for (const values of [one.y, one.raw, one.low, one.high]) if (values) values.forEach(seen);
    }
    for (const band of options.band || []) {
      x0 = Math.min(x0, band.from);
      x1 = Math.max(x1, band.to);
      seen(band.low);
      seen(band.high);
    }
    if (options.least !== undefined) seen(options.least);
    if (options.most !== undefined) seen(options.most);
    if (x0 > x1) [x0, x1] = [0, 1];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    else if (options.pad) [x0, x1] = [x0 - (x1 - x0) * 0.04, x1 + (x1 - x0) * 0.04];
    if (y0 > y1) [y0, y1] = options.log ? [0.1, 1] : [0, 1];
    if (y0 === y1) [y0, y1] = options.log ? [y0 / 2, y1 * 2] : around(y0, options.most);
    return [x0, x1, y0, y1];
  }

  // an axis for a value that never changes
  function around(value, most = Infinity) {
    if (value === 0) return [0, 1];
    const ends = [value / 2, value * 1.5].sort((a, b) => a - b);
    return [ends[0], Math.max(value, Math.min(ends[1], most))];
  }

  function scales(options, width, height, margin) {
    let [x0, x1, y0, y1] = extent(options);
    if (options.log) {
      const room = (y1 / y0) ** 0.04;
      y0 /= room;
      y1 *= room;
    } else {
      const room = (y1 - y0) * 0.05;
      const floor = options.least !== undefined && y0 >= options.least,
        roof = options.most !== undefined && y1 <= options.most;
      y0 = floor ? y0 : y0 - room;
      y1 = roof ? y1 + room / 2 : y1 + room;
    }
    const right = width - margin.right,
      bottom = height - margin.bottom;
    const go = options.log ? Math.log : Number;
    return {
      x0,
      x1,
      y0,
      y1,
      x: (value) => margin.left + ((value - x0) / (x1 - x0)) * (right - margin.left),
      y: (value) => bottom - ((go(value) - go(y0)) / (go(y1) - go(y0))) * (bottom - margin.top),
      back: (pixel) => x0 + ((pixel - margin.left) / (right - margin.left)) * (x1 - x0),
    };
  }

  function line(scale, xs, ys, log) {
    let path = "",
      open = false;
    for (let i = 0; i < xs.length; i++) {
      const y = ys[i];
      if (y === null || y === undefined || (log && y <= 0)) {
        open = false;
        continue;
      }
      path += `${open ? "L" : "M"}${scale.x(xs[i]).toFixed(1)} ${scale.y(y).toFixed(1)}`;
      open = true;
    }
    return path;
  }
  function area(scale, xs, lows, highs, log) {
    const there = [...xs.keys()].filter(
      (i) => lows[i] !== null && highs[i] !== null && (!log || lows[i] > 0),
    );
    if (!there.length) return "";
    const at = (values) => (i) => `${scale.x(xs[i]).toFixed(1)} ${scale.y(values[i]).toFixed(1)}`;
    return `M${there.map(at(highs)).join("L")}L${there.reverse().map(at(lows)).join("L")}Z`;
  }

  function plot(options, width, tip) {
    const height = options.height || 200,
      yFormat = options.yFormat || format,
      xFormat = options.xFormat || short;
    const margin = { left: 52, right: 14, top: 10, bottom: options.xLabel ? 40 : 24 };
    const { y0, y1 } = scales(options, width, height, margin);
    const yTicks = options.log
      ? logTicks(y0, y1)
      : (options.axisTicks || ticks)(y0, y1, Math.max(2, height / 44));
    const yTexts = options.yTick ? yTicks.map((value) => options.yTick(value)) : shortest(yTicks);
    margin.left = Math.max(52, 14 + 7 * Math.max(0, ...yTexts.map((text) => text.length)));
    const scale = scales(options, width, height, margin),
      right = width - margin.right,
      bottom = height - margin.bottom;
    const root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": `${options.title || "chart"}; left and right arrows move along the curve`,
    });
    for (const [i, value] of yTicks.entries()) {
      root.append(
        svg("line", {
          class: "rule",
          x1: margin.left,
          x2: right,
          y1: scale.y(value),
          y2: scale.y(value),
        }),
      );
      root.append(
        svg(
          "text",
          { x: margin.left - 8, y: scale.y(value) + 4, "text-anchor": "end" },
          yTexts[i],
        ),
      );
    }
    root.append(svg("line", { class: "base", x1: margin.left, x2: right, y1: bottom, y2: bottom }));
    for (const value of (options.xTicks || ticks)(scale.x0, scale.x1, Math.max(2, width / 80)))
      root.append(
        svg("text", { x: scale.x(value), y: bottom + 17, "text-anchor": "middle" }, xFormat(value)),
      );
    if (options.xLabel)
      root.append(svg("text", { x: right, y: bottom + 34, "text-anchor": "end" }, options.xLabel));
    drawBands(root, options, scale);
    drawSeries(root, options, scale);
    drawMarks(root, options, scale, margin.top, bottom);
    addHover(
      root,
      options,
      scale,
      { left: margin.left, right, top: margin.top, bottom, width },
      tip,
      xFormat,
      yFormat,
    );
    return root;
  }

  function drawBands(root, options, scale) {
    const bands = options.band || [],
      at = (end) => (band) =>
        `${scale.x(band.to).toFixed(1)} ${scale.y(Math.max(band[end], scale.y0)).toFixed(1)}`;
    if (bands.length > 1)
      root.append(
        svg(
          "path",
          {
            class: "expected",
            d: `M${bands.map(at("high")).join("L")}L${[...bands].reverse().map(at("low")).join("L")}Z`,
          },
          svg("title", {}, "expected"),
        ),
      );
    else
      for (const band of bands) {
        const y1 = scale.y(Math.min(band.high, scale.y1)),
          y0 = scale.y(Math.max(band.low, scale.y0)),
          x = scale.x(band.from);
        root.append(
          svg(
            "rect",
            {
              class: "expected",
              x,
              y: y1,
              width: Math.max(3, scale.x(band.to) - x),
              height: Math.max(2, y0 - y1),
              rx: 2,
            },
            svg("title", {}, band.text || "expected"),
          ),
        );
      }
  }
  function drawSeries(root, options, scale) {
    for (const one of options.series) {
      const stroke = `stroke:${one.color}`;
      if (one.low)
        root.append(
          svg("path", {
            class: "spread",
            d: area(scale, one.x, one.low, one.high, options.log),
            style: `fill:${one.color}`,
          }),
        );
      if (one.raw)
        root.append(
          svg("path", { class: "raw", d: line(scale, one.x, one.raw, options.log), style: stroke }),
        );
      root.append(
        svg("path", {
          class: "curve",
          d: line(scale, one.x, one.y, options.log),
          style: stroke,
          "stroke-dasharray": one.dashed ? "5 4" : null,
        }),
      );
      const alone = one.y.filter((y) => y !== null && y !== undefined).length === 1; // a path of one point shows nothing
      if (one.dots || alone)
        one.x.forEach((x, i) => {
          if (one.y[i] !== null && one.y[i] !== undefined && !(options.log && one.y[i] <= 0))
            root.append(
              svg("circle", {
                cx: scale.x(x),
                cy: scale.y(one.y[i]),
                r: one.radius || 3,
                style: `fill:${one.color}`,
              }),
            );
        });
    }
  }

  // marks on the axis differ in shape, not in colour alone
  const SHAPES = {
    checkpoint: ["M0 0l-4 7h8z", "clue", true],
    restart: ["M0 -1v9M-4.5 3.5h9", "accent", false],
    ranks: ["M-3.5 0h7v7h-7z", "c4", true],
    skipped: ["M-3 0l6 7M3 0l-6 7", "bad", false],
    signal: ["M1.5 -1l-4 5h5l-4 5", "changed", false],
    failed: ["M0 -1l4.5 4.5l-4.5 4.5l-4.5 -4.5z", "bad", true],
  };
  function markShape(kind, transform) {
    const [d, color, filled] = SHAPES[kind];
    return svg("path", {
      d,
      transform,
      style: `fill:${filled ? `var(--${color})` : "none"};stroke:var(--${color});stroke-width:1.5`,
    });
  }
  function drawMarks(root, options, scale, top, bottom) {
    const heaps = new Map();
    for (const mark of options.marks || []) {
      if (!SHAPES[mark.kind]) continue;
      const x = scale.x(Math.max(scale.x0, Math.min(scale.x1, mark.x))),
        heap = heaps.get(Math.round(x / 6)) || 0,
        shape = markShape(mark.kind, `translate(${x.toFixed(1)} ${bottom - 8 - 11 * (heap % 6)})`);
      heaps.set(Math.round(x / 6), heap + 1);
      if (mark.kind !== "checkpoint")
        root.append(
          svg("line", {
            x1: x,
            x2: x,
            y1: top,
            y2: bottom - 10,
            style: `stroke:var(--${SHAPES[mark.kind][1]})`,
            "stroke-dasharray": "2 4",
            opacity: 0.6,
          }),
        );
      shape.append(svg("title", {}, mark.text));
      root.append(shape);
    }
  }

  function addHover(root, options, scale, box, tip, xFormat, yFormat) {
    const cross = svg("line", {
      class: "cross",
      y1: box.top,
      y2: box.bottom,
      visibility: "hidden",
    });
    const dots = options.series.map((one) =>
      svg("circle", {
        r: 3.5,
        visibility: "hidden",
        style: `fill:${one.color};stroke:var(--panel);stroke-width:1.5`,
      }),
    );
    root.append(cross, ...dots);
    const every = [...new Set(options.series.flatMap((one) => one.x))].sort((a, b) => a - b);
    let place = null;
    const hide = () => {
      tip.hidden = true;
      for (const each of [cross, ...dots]) each.setAttribute("visibility", "hidden");
    };
    const show = (index) => {
      place = index;
      const x = every[index],
        pixel = scale.x(x),
        near = (scale.x1 - scale.x0) * 0.02,
        rows = [];
      cross.setAttribute("x1", pixel);
      cross.setAttribute("x2", pixel);
      cross.setAttribute("visibility", "visible");
      options.series.forEach((one, i) => {
        const at = one.x.length ? nearest(one.x, x) : -1,
          y = at < 0 ? null : one.y[at];
        const there =
          y !== null &&
          y !== undefined &&
          Math.abs(one.x[at] - x) <= Math.max(near, 1e-12) &&
          !(options.log && y <= 0);
        dots[i].setAttribute("visibility", there ? "visible" : "hidden");
        if (!there) return;
        dots[i].setAttribute("cx", scale.x(one.x[at]));
        dots[i].setAttribute("cy", scale.y(y));
        rows.push(
          el(
            "div",
            {},
            el(
              "span",
              { class: "key" },
              el("span", {
                class: `swatch${one.dashed ? " dashed" : ""}`,
                style: `border-color:${one.color}`,
              }),
              one.name,
            ),
            yFormat(y),
          ),
        );
      });
      for (const mark of options.marks || [])
        if (Math.abs(mark.x - x) <= near / 2) rows.push(el("div", { class: "key" }, mark.text));
      tip.replaceChildren(
        el("b", {}, `${options.xName || ""} ${(options.xValue || xFormat)(x)}`.trim()),
        ...rows,
      );
      tip.hidden = false;
      const left =
        pixel + 14 + tip.offsetWidth > box.width ? pixel - 14 - tip.offsetWidth : pixel + 14;
      tip.style.transform = `translate(${Math.max(0, left)}px, ${box.top}px)`;
    };
    if (!every.length) return;
    root.addEventListener("pointermove", (event) => {
      const frame = root.getBoundingClientRect();
      show(nearest(every, scale.back(((event.clientX - frame.left) / frame.width) * box.width)));
    });
    root.addEventListener("pointerleave", hide);
    root.addEventListener("blur", hide);
    root.addEventListener("keydown", (event) => {
      const step = {
        ArrowLeft: -1,
        ArrowRight: 1,
        PageUp: -10,
        PageDown: 10,
        Home: -1e9,
        End: 1e9,
      }[event.key];
      if (step === undefined) {
        if (event.key === "Escape") hide();
        return;
      }
      event.preventDefault();
      show(
        Math.max(
          0,
          Math.min(
            every.length - 1,
            (place === null ? every.length - 1 : place) + (place === null ? 0 : step),
          ),
        ),
      );
    });
  }

  // ---- the page

  const page = {
    payload: null,
    sections: [],
    view: { axis: "step", log: false, smooth: 0.6 },
    redraws: [],
  };
  const COLORS = [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `var(--c${n})`);
  const runs = () => page.payload.runs;
  const several = () => runs().length > 1;

  function section(id, title, about, ...children) {
    page.sections.push([id, title]);
    return el(
      "section",
      { id, "aria-labelledby": `${id}-title` },
      el("h2", { id: `${id}-title` }, title),
      about && el("p", { class: "about" }, about),
      ...children,
    );
  }
  const panel = (...children) => el("div", { class: "panel" }, ...children);
  const swatch = (color, dashed) =>
    el("span", { class: `swatch${dashed ? " dashed" : ""}`, style: `border-color:${color}` });
  const plural = (count, word) => `${format(count)}\u00a0${word}${count === 1 ? "" : "s"}`;
  const day = (seconds) => new Date(seconds * 1000).toLocaleString("sv-SE").slice(0, 16);

  function copyButton(text, what) {
    const button = el(
      "button",
      {
        type: "button",
        class: "copy",
        "aria-label": `Copy ${what}`,
        onclick: async () => {
          try {
            await navigator.clipboard.writeText(text);
          } catch {
            const area = el("textarea", {}, text);
            document.body.append(area);
            area.select();
            document.execCommand("copy");
            area.remove();
          }
          button.textContent = "Copied";
          setTimeout(() => {
            button.textContent = "Copy";
          }, 1500);
        },
      },
      "Copy",
    );
    return button;
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
  function toggle(text, pressed, change) {
    const button = el(
      "button",
      {
        type: "button",
        "aria-pressed": String(pressed),
        onclick: () => {
          const now = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", String(now));
          change(now);
        },
      },
      text,
    );
    return button;
  }

  function bar() {
    const root = document.documentElement,
      media = matchMedia("(prefers-color-scheme: dark)");
    let kept = null;
    try {
      kept = localStorage.getItem("lockstep-theme");
    } catch {
      /* storage is off: the choice lasts until the page closes */
    }
    const set = (dark) => {
      root.classList.toggle("dark", dark);
      button.textContent = dark ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${dark ? "light" : "dark"} colours`);
    };
    const button = el("button", {
      type: "button",
      class: "theme",
      onclick: () => {
        kept = root.classList.contains("dark") ? "light" : "dark";
        set(kept === "dark");
        try {
          localStorage.setItem("lockstep-theme", kept);
        } catch {
          /* storage is off */
        }
      },
    });
    set(kept ? kept === "dark" : media.matches);
    media.addEventListener("change", (event) => {
      if (!kept) set(event.matches);
    });
    const links = page.sections.map(([id, title]) => el("a", { href: `#${id}` }, title));
    return el("div", { class: "bar" }, el("nav", { "aria-label": "Sections" }, links), button);
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
  function pill(state) {
    state = state || "";
    return el(
      "span",
      { class: `state ${STATES[state] || ""}` },
      el("i", { class: "dot" }),
      SAID[state] || state,
    );
  }

  function figure(label, value, note, extra, first) {
    return el(
      "div",
      { class: `number${first ? " first" : ""}` },
      el("div", { class: "label" }, label),
      el("div", { class: "value" }, value),
      extra,
      note && el("div", { class: "note" }, note),
    );
  }

  function headlineFigure(run) {
    const told = run.headline;
    if (!told) return null;
    const show = (value) => valueOf(told.name, value);
    const name = words(told.name),
      label = `Held-out ${name}`;
    const yet = run.status.state === "running" ? " yet" : "";
    if (told.last === null) return figure(label, "–", `not evaluated${yet}`, null, true);
    const notes = [];
    if (told.low !== null && told.high !== null)
      notes.push(
        `95 % interval ${show(told.low)} to ${show(told.high)}${told.n ? `, n\u00a0=\u00a0${format(told.n)}` : ""}`,
      );
    const at = `after step\u00a0${format(told.step)}`;
    notes.push(
      told.best === told.last
        ? `${at}, the best ${yet ? "so far" : "of the run"}`
        : `${at}; best ${show(told.best)} after step\u00a0${format(told.best_step)}`,
    );
    return figure(
      label,
      show(told.last),
      notes.map((note) => el("div", {}, note)),
      verdict(run),
      true,
    );
  }

  function verdict(run) {
    const expected = run.expected;
    if (!expected || !expected.points.length) return null;
    const within = expected.points.filter((point) => point.step <= lengthOf(run));
    const show = (point) =>
      `${valueOf(expected.name, point.low)} to ${valueOf(expected.name, point.high)}`;
    if (expected.measured) {
      const fine = expected.verdict === "on track";
      return el(
        "div",
        { class: `verdict ${fine ? "good-text" : "bad-text"}` },
        el("b", {}, fine ? "✓ On track" : "▼ Below expectation"),
        el(
          "span",
          {},
          ` · ${show(expected.measured)} expected at step\u00a0${format(expected.measured.step)}`,
        ),
      );
    }
    const [next] = within;
    return (
      next &&
      el("div", { class: "verdict" }, `Expected: ${show(next)} at step ${format(next.step)}`)
    );
  }

  const lengthOf = (run) =>
    run.started.total_steps ||
    Math.max(run.step || 0, ...((run.expected || {}).points || []).map((point) => point.step));
  function median(values) {
    const known = (values || []).filter((value) => value !== null).sort((a, b) => a - b);
    return known.length ? known[known.length >> 1] : null;
  }

  function numbers(run) {
    const total = run.started.total_steps,
      step = run.step ?? run.status.step,
      curves = run.train.curves;
    const share = total ? Math.min(1, (step || 0) / total) : null;
    const tokens =
      run.started.tokens_per_example > 1 && /token/i.test(run.config["data._target_"] || "");
    const speed = median(
        (curves[tokens ? "speed/tokens_per_s" : "speed/examples_per_s"] || {}).mean,
      ),
      each = median((curves["speed/step_ms"] || {}).mean);
    const meter =
      share === null
        ? null
        : el(
            "div",
            { class: "meter", role: "img", "aria-label": `${Math.round(100 * share)} % done` },
            el("i", { style: `width:${(100 * share).toFixed(1)}%` }),
          );
    const left =
      run.status.state === "running" && each && total > step
        ? `about ${duration(((total - step) * each) / 1000)} of training left`
        : "";
    return el(
      "div",
      { class: "numbers" },
      headlineFigure(run),
      figure(
        "Steps",
        [format(step), total ? el("small", {}, ` of ${format(total)}`) : null],
        left,
        meter,
      ),
      figure(
        "Time",
        duration(run.seconds),
        run.starts.length
          ? `began ${day(run.starts[0].time)}${run.starts.length > 1 ? `, ${run.starts.length} starts` : ""}`
          : "",
      ),
      figure(
        "Speed",
        speed === null
          ? "–"
          : [short(speed), el("small", {}, tokens ? " tokens/s" : " examples/s")],
        each === null ? "" : `${format(each)} ms a step, median`,
      ),
    );
  }

  function subtitle(run) {
    const start = run.started,
      model = (run.config["arch._target_"] || "").split(".").pop();
    return [
      model,
      start.parameters ? `${format(start.parameters)} parameters` : "",
      start.data || "",
      start.dtype || "",
    ]
      .filter(Boolean)
      .join(" · ");
  }

  function facts(run) {
    const start = run.started,
      code = run.code,
      list = el("dl", { class: "facts" });
    const add = (name, ...value) => {
      if (value.flat().some(Boolean))
        list.append(el("div", {}, el("dt", {}, name), el("dd", {}, ...value)));
    };
    const mono = (text, full) => text && el("code", { title: full || text }, text);
    const ranks = run.starts
      .map((each) => each.ranks)
      .filter((count, i, all) => count && count !== all[i - 1]);
    if (start.ranks)
      add(
        "Ran on",
        `${ranks.map((count) => plural(count, "rank")).join(", then ")} on ${(start.hosts || []).join(", ")}: ${start.device}, ${plural(start.threads, "thread")} of ${format(start.cores)}`,
      );
    if (start.torch) add("Versions", `PyTorch ${start.torch}, Python ${start.python || "–"}`);
    const revision = code.revision || "";
    if (revision) {
      const lines = code.changes.reduce(
        (sum, [, added, removed]) => [sum[0] + added, sum[1] + removed],
        [0, 0],
      );
      add(
        "Code",
        mono(revision.slice(0, 10), revision),
        ` on ${code.branch || "–"}${code.changes.length ? ", " : ""}`,
        code.changes.length
          ? el(
              "details",
              { class: "inline" },
              el(
                "summary",
                {},
                `${plural(code.changes.length, "file")} not committed, +${lines[0]} −${lines[1]}`,
              ),
              el(
                "ul",
                {},
                code.changes.map(([name, added, removed]) =>
                  el("li", {}, el("code", {}, name), ` +${added} −${removed}`),
                ),
              ),
            )
          : "",
      );
    }
    if (start.fingerprint)
      add("Data", `${start.data || ""} `, mono(start.fingerprint.slice(0, 16), start.fingerprint));
    const digest = [...run.digests].reverse().find((each) => each.digest);
    if (digest)
      add(
        "Digest",
        mono(digest.digest.slice(0, 16), digest.digest),
        ` of the checkpoint of step ${format(digest.step)} `,
        copyButton(digest.digest, "the digest"),
      );
    add("Directory", mono(run.directory));
    const command = run.commands.continue;
    if (command) {
      const ends = ["finished", "running"].includes(run.status.state);
      add(
        ends ? "Command" : "To continue",
        el("span", { class: "command" }, mono(command), copyButton(command, "the command")),
      );
      const again = `${code.revision ? `git checkout ${code.revision.slice(0, 10)} && ` : ""}${command} resume=false`;
      add(
        "To reproduce",
        el(
          "span",
          { class: "command" },
          mono(again),
          copyButton(again, "the command to reproduce"),
        ),
        code.changes.length
          ? el("div", { class: "note" }, "with the changes in uncommitted.diff applied")
          : "",
      );
    }
    return list.childElementCount ? list : null;
  }

  function head(run) {
    return el(
      "header",
      {},
      el("p", { class: "over" }, run.project),
      el(
        "div",
        { class: "title" },
        el("h1", {}, run.name),
        pill(run.status.state),
        run.status.state === "running" &&
          el("span", { class: "over" }, `as of ${day(page.payload.made)}`),
      ),
      el("p", { class: "subtitle" }, subtitle(run)),
      run.status.reason &&
        el("p", { class: `reason ${STATES[run.status.state] || ""}` }, run.status.reason),
      numbers(run),
      facts(run),
    );
  }

  function headOfSeveral() {
    const names = page.payload.runs.map((run) => run.name);
    const rows = runs().map((run, i) => ({
      run: el("span", {}, swatch(run.color), run.name),
      state: pill(run.status.state),
      metric:
        run.headline && run.headline.last !== null
          ? valueOf(run.headline.name, run.headline.last)
          : "–",
      best:
        run.headline && run.headline.last !== null
          ? valueOf(run.headline.name, run.headline.best)
          : "–",
      step: format(run.step),
      time: duration(run.seconds),
      where: run.started.ranks
        ? `${plural(run.started.ranks, "rank")}, ${run.started.device}`
        : "–",
      directory: el("code", {}, run.directory),
    }));
    const metric = runs()[0].headline ? words(runs()[0].headline.name) : "metric",
      told = runs().some((run) => run.verdict);
    runs().forEach((run, i) => {
      const same = run.verdict && run.verdict.same;
      rows[i].verdict = !run.verdict
        ? "–"
        : el(
            "span",
            {
              class: same ? "good-text" : same === false ? "bad-text" : "",
              title: run.verdict.text,
            },
            same
              ? "✓ same"
              : same === false
                ? `✕ differs from step ${format(run.verdict.step)} on`
                : "nothing in common",
          );
    });
    const columns = [
      ["run", "Run"],
      ["state", "State"],
      ["metric", `Last ${metric}`],
      ["best", "Best"],
      ["step", "Steps"],
      ["time", "Time"],
      ["where", "Ran on"],
      ...(told ? [["verdict", "Against the first"]] : []),
      ["directory", "Directory"],
    ];
    return el(
      "header",
      {},
      el("p", { class: "over" }, `${names.length} runs`),
      el(
        "h1",
        {},
        names.join(", ").length <= 60
          ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`
          : `${names[0]} and ${plural(names.length - 1, "other")}`,
      ),
      page.payload.same &&
        el(
          "p",
          {
            class: `answer ${page.payload.same.verdict.same ? "good" : page.payload.same.verdict.same === false ? "bad" : ""}`,
          },
          page.payload.same.verdict.text,
        ),
      table(columns, rows),
    );
  }

  function table(columns, rows) {
    return el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            columns.map(([, title]) => el("th", { scope: "col" }, title)),
          ),
        ),
        el(
          "tbody",
          {},
          rows.map((row) =>
            el(
              "tr",
              {},
              columns.map(([key]) => el("td", {}, row[key])),
            ),
          ),
        ),
      ),
    );
  }

  // ---- curves

  const AXES = { step: "step", examples: "examples", seconds: "time" };
  function places(run, rows) {
    const { axis } = page.view;
    if (axis === "examples")
      return rows.step.map(
        (step) =>
          step * (run.started.examples_per_step || Number(run.config.global_batch_size) || 1),
      );
    if (axis === "seconds")
      return rows.seconds.map((seconds) => (seconds === null ? 0 : seconds / timeUnit()[0]));
    return rows.step;
  }
  function timeUnit() {
    const longest = Math.max(...runs().map((run) => run.seconds));
    return longest < 180 ? [1, "s"] : longest < 7200 ? [60, "min"] : [3600, "h"];
  }
  const xTicks = () => (page.view.axis === "seconds" ? undefined : wholeTicks);
  const axisText = () =>
    page.view.axis === "seconds" ? `time in ${timeUnit()[1]}` : page.view.axis;
  const xValue = (x) =>
    page.view.axis === "seconds" ? `${format(x)} ${timeUnit()[1]}` : format(Math.round(x));

  function smoothed(values, weight) {
    let sum = 0,
      total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function marksOf(list) {
    const told = (mark) => !several() || mark.kind !== "checkpoint"; // too many, of several runs
    return list.flatMap((run) =>
      run.marks.filter(told).map((mark) => ({
        ...mark,
        text: several() ? `${run.name}: ${mark.text}` : mark.text,
        x: places(run, { step: [mark.step], seconds: [mark.seconds] })[0],
      })),
    );
  }

  const isInterval = (name, curves) =>
    /_(low|high|n)$/.test(name) && curves[name.replace(/_(low|high|n)$/, "")] !== undefined;
  // eval/SET/METRIC/PART: what several sets or the whole have in common is a metric, and what stands before it a set
  function setsOf() {
    const names = new Set(
      runs().flatMap((run) => [...Object.keys(run.eval.curves), ...Object.keys(run.train.curves)]),
    );
    const files = runs().flatMap((run) =>
      run.files.map((file) => decoded(file.path.split("/")[2] || "")),
    );
    const found = new Set(files);
    for (const name of names) {
      const [kind, set, ...rest] = name.split("/");
      if (
        kind === "eval" &&
        rest.length &&
        (names.has(`eval/${rest.join("/")}`) || names.has(`train/${rest.join("/")}`))
      )
        found.add(set);
    }
    return found;
  }
  const decoded = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  };
  function groupsOfMetrics() {
    const found = new Map(),
      sets = setsOf(),
      judging = (runs()[0].headline || { name: "" }).name;
    let judged = "";
    for (const run of runs())
      for (const kind of ["train", "eval"])
        for (const name of Object.keys(run[kind].curves)) {
          if (!name.startsWith(`${kind}/`) || isInterval(name, run[kind].curves)) continue;
          const parts = name.split("/").slice(1),
            set = parts.length > 1 && kind === "eval" && sets.has(parts[0]) ? [parts.shift()] : [],
            [of] = set;
          const metric = parts.shift(),
            label = [...set, ...parts].join(" · ");
          if (!found.has(metric)) found.set(metric, new Map());
          found.get(metric).set(`${kind} ${label}`, { kind, set: label, name, of });
          if (name === judging) judged = metric;
        }
    const rank = (metric) =>
      metric === judged
        ? 0
        : metric === "loss"
          ? 1
          : metric === "lr"
            ? 4
            : /accuracy|bpb|match/.test(metric)
              ? 2
              : 3;
    for (const members of found.values()) {
      // where one set alone has a metric, it is the same as that of all sets
      const whole = (member) => member.name.replace(`eval/${member.of}/`, "eval/");
      for (const [key, member] of members)
        if (member.of && runs().every((run) => sameCurves(run, member.name, whole(member))))
          members.delete(key);
    }
    for (const [metric, members] of numbered(found)) found.set(metric, members);
    return [...found]
      .sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b))
      .map(([metric, members]) => ({
        metric,
        members: [...members.values()],
        judged: metric === judged,
      }));
  }

  function sameCurves(run, one, other) {
    const curves = run.eval.curves;
    return JSON.stringify(curves[one]) === JSON.stringify(curves[other]);
  }

  // recall_0, recall_1 … are one chart
  function numbered(found) {
    const families = new Map();
    for (const metric of found.keys()) {
      const [, family, number] = /^(.*?)_(\d+)$/.exec(metric) || [];
      if (family && !found.has(family))
        families.set(family, [...(families.get(family) || []), [Number(number), metric]]);
    }
    return [...families]
      .filter(([, members]) => members.length >= 4)
      .map(([family, members]) => {
        const together = new Map();
        for (const [number, metric] of members.sort(([a], [b]) => a - b)) {
          for (const [key, member] of found.get(metric))
            together.set(`${key} ${number}`, {
              ...member,
              set: [member.set, number].filter((part) => part !== "").join(" "),
            });
          found.delete(metric);
        }
        return [family, together];
      });
  }

  function seriesOf(group) {
    const series = [];
    let held = 0;
    runs().forEach((run) =>
      group.members.forEach((member) => {
        const rows = run[member.kind],
          curve = rows.curves[member.name];
        if (!curve) return;
        const trained = member.kind === "train",
          many = curve.mean.length > 20,
          smooth = trained && many && page.view.smooth > 0 && member.name !== "train/lr";
        const kind = trained ? "training" : "held out",
          alike =
            group.members.length > 3 && group.members.every((each) => each.kind === member.kind);
        const what = alike ? member.set : `${kind}${member.set ? ` · ${member.set}` : ""}`;
        const low = rows.curves[`${member.name}_low`],
          high = rows.curves[`${member.name}_high`];
        series.push({
          name: several() ? `${run.name} · ${what}` : what,
          color: several() ? run.color : COLORS[trained ? 0 : 1 + (held++ % 7)],
          dashed: several() ? trained : held > 7,
          x: places(run, rows),
          y: smooth ? smoothed(curve.mean, page.view.smooth) : curve.mean,
          raw: smooth ? curve.mean : null,
          values: curve.mean,
          dots: !trained && rows.step.length <= 60,
          low: low && high && !several() ? low.mean : curve.min && !several() ? curve.min : null,
          high: low && high && !several() ? high.mean : curve.max && !several() ? curve.max : null,
        });
      }),
    );
    return series;
  }

  function bandsOf(group) {
    return runs()
      .slice(0, 1)
      .flatMap((run) => {
        const expected = run.expected;
        if (!expected || !group.members.some((member) => member.name === expected.name)) return [];
        const last = lengthOf(run);
        const at = (step) => places(run, { step: [step], seconds: [secondsAt(run, step)] })[0];
        return expected.points
          .filter((point) => point.step <= last)
          .map((point) => ({
            from: at(Math.max(0, point.step - 0.02 * last)),
            to: at(point.step),
            low: point.low,
            high: point.high,
            text: `expected at step ${format(point.step)}: ${valueOf(expected.name, point.low)} to ${valueOf(expected.name, point.high)}`,
          }));
      });
  }
  function secondsAt(run, step) {
    const rows = run.train.step.length ? run.train : run.eval;
    if (!rows.step.length) return 0;
    const i = nearest(rows.step, step),
      known = rows.seconds[i] || 0;
    return rows.step[i] ? known * Math.max(1, step / rows.step[rows.step.length - 1]) : known;
  }

  function chartPanel(group) {
    const place = el("div", {}),
      name = group.members[0].name;
    const names = seriesOf(group);
    const kinds = several()
      ? []
      : names.map((one) => el("span", {}, swatch(one.color, one.dashed), one.name));
    const expected = bandsOf(group).length
      ? el("span", {}, el("span", { class: "expected-key" }), "expected")
      : null;
    const box = el(
      "div",
      { class: `panel${group.judged ? " wide" : ""}` },
      el(
        "div",
        { class: "heading" },
        el("h3", { title: group.members.map((one) => one.name).join(", ") }, words(group.metric)),
        el("div", { class: "legend" }, kinds, expected),
      ),
      place,
    );
    const options = () => ({
      title: words(group.metric),
      series: seriesOf(group),
      height: group.judged ? 300 : 190,
      log: page.view.log,
      xLabel: axisText(),
      xName: page.view.axis === "seconds" ? "" : page.view.axis,
      xTicks: xTicks(),
      xValue,
      yFormat: (value) => valueOf(name, value),
      yTick:
        isShare(name) && !page.view.log
          ? (value) => `${Number((100 * value).toPrecision(4))} %`
          : undefined,
      marks: marksOf(runs()),
      band: bandsOf(group),
      most: isShare(name) && !page.view.log ? maxOf(group) : undefined,
    });
    const drawn = chart(place, options());
    page.redraws.push(() => drawn.redraw(options()));
    return box;
  }
  const maxOf = (group) =>
    seriesOf(group).some((one) => one.y.some((y) => y > 0.9)) ? 1 : undefined;

  const MARKS = {
    checkpoint: "checkpoint",
    restart: "restart",
    ranks: "other number of ranks",
    skipped: "skipped step",
    signal: "asked to stop",
    failed: "failure",
  };
  function markLegend() {
    const kinds = [...new Set(marksOf(runs()).map((mark) => mark.kind))].filter(
      (kind) => SHAPES[kind],
    );
    return kinds.length
      ? el(
          "div",
          { class: "legend marks" },
          kinds.map((kind) =>
            el(
              "span",
              {},
              svg(
                "svg",
                { width: 12, height: 12, viewBox: "-6 -3 12 13", "aria-hidden": "true" },
                markShape(kind),
              ),
              MARKS[kind],
            ),
          ),
        )
      : null;
  }

  const MOST_CURVES = 24; // in a chart of several runs
  function curvesSection() {
    const all = groupsOfMetrics(),
      fits = (group) => !several() || group.members.length * runs().length <= MOST_CURVES,
      groups = all.filter((group) => group.judged || fits(group)),
      left = all.filter((group) => !groups.includes(group));
    if (!groups.length)
      return section(
        "curves",
        "Curves",
        "",
        el("p", { class: "empty" }, "No metrics have been logged yet."),
      );
    const update = (change) => {
      Object.assign(page.view, change);
      for (const redraw of page.redraws) redraw();
    };
    const shown = el("output", {}, page.view.smooth.toFixed(2));
    const slider = el("input", {
      type: "range",
      min: 0,
      max: 0.98,
      step: 0.02,
      value: page.view.smooth,
      "aria-label": "Smoothing of training curves",
      oninput: (event) => {
        shown.textContent = Number(event.target.value).toFixed(2);
        update({ smooth: Number(event.target.value) });
      },
    });
    const controls = el(
      "div",
      { class: "controls" },
      segments(
        "Horizontal axis",
        [
          ["step", "Steps"],
          ["examples", "Examples"],
          ["seconds", "Wall clock"],
        ],
        page.view.axis,
        (axis) => update({ axis }),
      ),
      toggle("Log scale", page.view.log, (log) => update({ log })),
      el("label", {}, "Smoothing", slider, shown),
      markLegend(),
    );
    const legend = several()
      ? el(
          "div",
          { class: "legend" },
          runs().map((run) => el("span", {}, swatch(run.color), run.name)),
          el("span", {}, swatch("var(--muted)"), "held out"),
          el("span", {}, swatch("var(--muted)", true), "training"),
        )
      : null;
    return section(
      "curves",
      "Curves",
      "",
      controls,
      legend,
      el("div", { class: "grid" }, groups.map(chartPanel)),
      left.length > 0 &&
        el(
          "p",
          { class: "about after" },
          `Not shown, because of too many curves: ${left.map((group) => words(group.metric)).join(", ")}.`,
        ),
    );
  }

  // ---- speed

  const SPENT = [
    ["compute", "Computing", "var(--c1)"],
    ["data", "Waiting for data", "var(--c5)"],
    ["all_reduce", "Waiting for other ranks", "var(--c4)"],
    ["checkpoint", "Held up by checkpoints", "var(--c2)"],
    ["evaluation", "Evaluating", "var(--c3)"],
  ];
  function spentBar(run) {
    const parts = SPENT.map(([key, text, color]) => ({
        text,
        color,
        seconds: run.spent[key] || 0,
      })),
      sum = parts.reduce((total, part) => total + part.seconds, 0);
    const other = Math.max(0, run.seconds - sum);
    if (sum <= 0) return null;
    if (other > 0.005 * sum)
      parts.push({ text: "Starting and all else", color: "var(--line)", seconds: other });
    const total = parts.reduce((all, part) => all + part.seconds, 0),
      shown = parts.filter((part) => part.seconds > 0);
    const share = (part) =>
      part.seconds < total / 1000
        ? "< 0.1 %"
        : `${Number(((100 * part.seconds) / total).toPrecision(2))} %`;
    return el(
      "div",
      { class: "panel wide spent" },
      el(
        "div",
        { class: "heading" },
        el("h3", {}, several() ? `Where the time went · ${run.name}` : "Where the time went"),
        el("span", { class: "over" }, duration(total)),
      ),
      el(
        "div",
        {
          class: "stack",
          role: "img",
          "aria-label": shown.map((part) => `${part.text} ${share(part)}`).join(", "),
        },
        shown.map((part) =>
          el("i", {
            style: `flex-grow:${part.seconds / total};background:${part.color}`,
            title: `${part.text}: ${duration(part.seconds)}`,
          }),
        ),
      ),
      el(
        "div",
        { class: "legend large" },
        shown.map((part) =>
          el(
            "span",
            {},
            el("i", { class: "square", style: `background:${part.color}` }),
            `${part.text} `,
            el("b", {}, share(part)),
            ` ${duration(part.seconds)}`,
          ),
        ),
      ),
    );
  }

  function speedPanel(title, wanted, yFormat, least) {
    const make = () =>
      runs().flatMap((run) =>
        wanted(run).flatMap(([name, text, color, dashed]) => {
          const curve = run.train.curves[name];
          return curve
            ? [
                {
                  name: several() ? `${run.name}${text ? ` · ${text}` : ""}` : text || title,
                  color: several() ? run.color : color,
                  dashed,
                  x: places(run, run.train),
                  y: curve.mean,
                  low: several() ? null : curve.min,
                  high: several() ? null : curve.max,
                },
              ]
            : [];
        }),
      );
    const first = make();
    if (!first.length) return null;
    const place = el("div", {}),
      keys =
        first.length > 1 && !several()
          ? first.map((one) => el("span", {}, swatch(one.color, one.dashed), one.name))
          : null;
    const options = () => ({
      title,
      series: make(),
      height: 190,
      xLabel: axisText(),
      xName: page.view.axis === "seconds" ? "" : page.view.axis,
      xTicks: xTicks(),
      xValue,
      yFormat,
      yTick: yFormat === bytes ? bytes : undefined,
      least,
      marks: marksOf(runs()),
      log: false,
      axisTicks: yFormat === bytes ? byteTicks : null,
    });
    const drawn = chart(place, options());
    page.redraws.push(() => drawn.redraw(options()));
    return panel(
      el("div", { class: "heading" }, el("h3", {}, title), el("div", { class: "legend" }, keys)),
      place,
    );
  }
  function byteTicks(low, high, count) {
    const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10));
    return ticks(low / unit, high / unit, count).map((value) => value * unit);
  }

  function memoryOf(run) {
    const ranks = Object.keys(run.train.curves)
      .filter((name) => /^memory\/rank_\d+\/peak_bytes$/.test(name))
      .sort((a, b) => parseInt(a.slice(12), 10) - parseInt(b.slice(12), 10));
    if (!ranks.length) return [["memory/peak_bytes", "", COLORS[0]]];
    // rank 0's is also logged without a number, as that of a rank that is alone
    return ranks.map((name, i) => [
      i ? name : "memory/peak_bytes",
      `rank ${parseInt(name.slice(12), 10)}`,
      COLORS[i % 8],
      i >= 8,
    ]);
  }

  function speedSection() {
    const tokens = runs().some(
      (run) =>
        run.started.tokens_per_example > 1 && /token/i.test(run.config["data._target_"] || ""),
    );
    const ms = (value) => `${format(value)} ms`;
    const panels = [
      speedPanel(
        tokens ? "Tokens per second" : "Examples per second",
        () => [[tokens ? "speed/tokens_per_s" : "speed/examples_per_s", "", COLORS[0]]],
        format,
        0,
      ),
      speedPanel(
        "Time of a step, ms",
        () => [
          ["speed/step_ms", "whole step", COLORS[0]],
          ...(several()
            ? []
            : [
                ["speed/data_wait_ms", "data", COLORS[4]],
                ["speed/all_reduce_ms", "other ranks", COLORS[3], true],
                ["speed/checkpoint_ms", "checkpoint", COLORS[1], true],
              ]),
        ],
        ms,
        0,
      ),
      speedPanel(
        runs().some((run) => memoryOf(run).length > 1) ? "Peak memory by rank" : "Peak memory",
        memoryOf,
        bytes,
        0,
      ),
      speedPanel("Model FLOPs utilisation", () => [["speed/mfu", "", COLORS[0]]], percent, 0),
    ].filter(Boolean);
    if (!panels.length) return null;
    return section(
      "speed",
      "Speed",
      "",
      el("div", { class: "grid" }, runs().map(spentBar), panels),
    );
  }

  // ---- the model at work

  function scenesSection(run) {
    const steps = [...new Set(run.scenes.map((each) => each.step))];
    if (!steps.length) return null;
    const holder = el("div", { class: "scenes" });
    const show = (step) =>
      holder.replaceChildren(...run.scenes.filter((each) => each.step === step).map(scenePanel));
    const controls =
      steps.length > 1
        ? el(
            "div",
            { class: "controls" },
            el(
              "label",
              {},
              "Evaluation after step",
              el(
                "select",
                { onchange: (event) => show(Number(event.target.value)) },
                steps.map((step) => el("option", { value: step }, format(step))),
              ),
            ),
          )
        : null;
    page.later.push(() => show(steps[0]));
    return section(
      "model",
      "The model at work",
      steps.length > 1 ? "" : `After step ${format(steps[0])}.`,
      controls,
      holder,
    );
  }
  function scenePanel({ scene, name, set }) {
    const place = el("div", {}),
      draws = window.lockstepScenes[scene.kind];
    const box = el(
      "div",
      { class: "panel scene" },
      el(
        "div",
        { class: "heading" },
        el("h3", {}, String(scene.title || words(name))),
        el("span", { class: "over" }, set),
      ),
      place,
    );
    requestAnimationFrame(() => {
      try {
        if (typeof draws === "function") draws(place, scene);
        else
          place.append(
            el("p", { class: "over" }, `Nothing here draws scenes of the kind “${scene.kind}”.`),
          );
      } catch (error) {
        place.replaceChildren(
          el("p", { class: "over" }, `This scene cannot be drawn (${error.message}).`),
        );
      }
    });
    return box;
  }

  // ---- the same run

  function sameSection(run) {
    const known = run.digests.filter((each) => each.digest || each.bytes);
    if (!known.length) return null;
    const rows = [...known].reverse().map((each) => ({
      step: format(each.step),
      bytes: each.bytes ? bytes(each.bytes) : "–",
      time: each.time ? day(each.time) : "–",
      digest: each.digest
        ? el(
            "span",
            { class: "command" },
            el("code", { class: "digest", title: each.digest }, each.digest),
            copyButton(each.digest, `the digest of step ${each.step}`),
          )
        : el(
            "span",
            { class: "over" },
            "not computed while the run was going on: python -m utils.checkpoint digest",
          ),
    }));
    const about = run.exact
      ? "The run is exact: any number of ranks gives these digests. One sha256 over all tensors of a checkpoint."
      : "One sha256 over all tensors of each checkpoint. With exact=true any number of ranks gives the same.";
    return section(
      "same",
      "Same run",
      about,
      panel(
        table(
          [
            ["step", "Step"],
            ["digest", "Digest"],
            ["bytes", "Size"],
            ["time", "Written"],
          ],
          rows,
        ),
      ),
    );
  }

  function comparedSection() {
    const same = page.payload.same;
    if (!same) return null;
    const [a, b] = runs(),
      parts = [];
    const merged = new Map(
      same.recorded.map((each) => [
        each.step,
        { step: each.step, same: each.same, digests: each.digests },
      ]),
    );
    for (const each of same.checkpoints)
      merged.set(each.step, { ...merged.get(each.step), ...each });
    const mark = (fine) =>
      el("span", { class: fine ? "good-text" : "bad-text" }, fine ? "✓ same" : "✕ differs");
    const code = (text) => (text ? el("code", { title: text }, text.slice(0, 12)) : "–");
    const rows = [...merged.values()]
      .sort((one, other) => one.step - other.step)
      .map((each) => ({
        step: format(each.step),
        same: mark(each.same),
        a: code(each.digests && each.digests[0]),
        b: code(each.digests && each.digests[1]),
        tensors:
          each.count === undefined
            ? "only digests are left"
            : each.unreadable
              ? each.unreadable
            : each.same
              ? `${plural(each.count, "tensor")} compared`
              : `${format(each.differing)} of ${plural(each.count, "tensor")} differ`,
      }));
    if (rows.length)
      parts.push(
        panel(
          el("h3", {}, "Checkpoints"),
          table(
            [
              ["step", "Step"],
              ["same", "Result"],
              ["a", `Digest · ${a.name}`],
              ["b", `Digest · ${b.name}`],
              ["tensors", "Tensors"],
            ],
            rows,
          ),
        ),
      );
    if (same.first && same.first.tensors.length) {
      const differing = same.first.tensors.map((each) => ({
        name: el("code", {}, each.name),
        shape: each.why || (each.shape || []).join(" × ") || "scalar",
        largest: each.largest === undefined ? "–" : format(each.largest),
        count: each.count === undefined ? "–" : `${format(each.count)} of ${format(each.of)}`,
      }));
      const shown = differing.length < same.first.differing ? `, the first ${differing.length}` : "";
      parts.push(
        panel(
          el("h3", {}, `Tensors that differ at step ${format(same.first.step)}${shown}`),
          table(
            [
              ["name", "Tensor"],
              ["shape", "Shape"],
              ["largest", "Largest difference"],
              ["count", "Values that differ"],
            ],
            differing,
          ),
        ),
      );
    }
    const at = same.metrics.differs;
    const told = at
      ? `Logged metrics agree up to step ${format(at.step)}, where ${at.name} is ${at.values[0]} and ${at.values[1]}.`
      : `Logged metrics of ${plural(same.metrics.steps, "common step")} agree to the last bit.`;
    return section("same", "Same run", told, el("div", { class: "stacked" }, parts));
  }

  // ---- files

  function picturesSection(run) {
    if (!run.pictures.length) return null;
    return section(
      "pictures",
      "Pictures",
      `Left by the evaluation after step ${format(run.pictures[0].step)}.`,
      el(
        "div",
        { class: "grid pictures" },
        run.pictures.map((picture) =>
          el(
            "figure",
            { class: "panel picture" },
            el(
              "figcaption",
              {},
              el("h3", {}, words(picture.name)),
              el("span", { class: "over" }, picture.set),
            ),
            el("img", { src: picture.uri, alt: `${words(picture.name)} of ${picture.set}` }),
          ),
        ),
      ),
    );
  }

  function filesSection() {
    const parts = [];
    if (several()) parts.push(differences());
    for (const run of runs()) {
      const name = several() ? ` · ${run.name}` : "",
        keys = Object.entries(run.config);
      if (keys.length)
        parts.push(
          el(
            "details",
            { class: "panel" },
            el(
              "summary",
              {},
              `Configuration${name}`,
              el("span", { class: "over" }, ` ${plural(keys.length, "key")}`),
            ),
            configTable(keys),
          ),
        );
      if (run.code.diff)
        parts.push(
          el(
            "details",
            { class: "panel" },
            el(
              "summary",
              {},
              `Uncommitted changes${name}`,
              el("span", { class: "over" }, ` ${plural(run.code.changes.length, "file")}`),
            ),
            diffOf(run.code),
          ),
        );
      if (run.log.length)
        parts.push(
          el(
            "details",
            { class: "panel" },
            el(
              "summary",
              {},
              `Log${name}`,
              el("span", { class: "over" }, ` last ${plural(run.log.length, "line")}`),
            ),
            el("pre", { class: "log", tabindex: 0 }, run.log.join("\n")),
          ),
        );
      if (run.starts.length > 1)
        parts.push(
          el(
            "details",
            { class: "panel" },
            el(
              "summary",
              {},
              `Starts${name}`,
              el("span", { class: "over" }, ` ${run.starts.length}`),
            ),
            table(
              [
                ["time", "When"],
                ["step", "At step"],
                ["ranks", "Ranks"],
                ["hosts", "Hosts"],
                ["device", "Device"],
                ["torch", "PyTorch"],
              ],
              run.starts.map((start) => ({
                time: day(start.time),
                step: format(start.step),
                ranks: format(start.ranks),
                hosts: (start.hosts || []).join(", "),
                device: start.device,
                torch: start.torch,
              })),
            ),
          ),
        );
      if (run.files.length)
        parts.push(
          el(
            "details",
            { class: "panel" },
            el(
              "summary",
              {},
              `Files of evaluations${name}`,
              el("span", { class: "over" }, ` ${run.files.length}`),
            ),
            table(
              [
                ["path", "File"],
                ["bytes", "Size"],
              ],
              run.files.map((file) => ({
                path: several()
                  ? el("code", {}, file.path)
                  : el(
                      "a",
                      { href: file.path.split("/").map(encodeURIComponent).join("/") },
                      file.path,
                    ),
                bytes: bytes(file.bytes),
              })),
            ),
          ),
        );
    }
    return parts.filter(Boolean).length
      ? section(
          "files",
          several() ? "Configuration" : "Details",
          "",
          el("div", { class: "stacked" }, parts),
        )
      : null;
  }
  function diffOf({ diff, cut }) {
    const sort = { "+": "good-text", "-": "bad-text", "@": "over" };
    const shown = diff
      .split("\n")
      .map((line) => el("span", { class: sort[line[0]] || null }, `${line}\n`));
    const rest = cut && el("span", { class: "over" }, "… the rest is in uncommitted.diff");
    return el("pre", { class: "log", tabindex: 0 }, shown, rest);
  }
  function configTable(keys) {
    const rows = keys.map(([key, value]) => [
      key,
      el("tr", {}, el("td", {}, el("code", {}, key)), el("td", {}, el("code", {}, value))),
    ]);
    const filter = el("input", {
      type: "search",
      placeholder: "Filter keys",
      "aria-label": "Filter keys of the configuration",
      oninput: (event) => {
        for (const [key, row] of rows) row.hidden = !key.includes(event.target.value.trim());
      },
    });
    return el(
      "div",
      {},
      el("div", { class: "controls" }, filter),
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "configuration" },
        el(
          "table",
          {},
          el(
            "tbody",
            {},
            rows.map(([, row]) => row),
          ),
        ),
      ),
    );
  }
  function differences() {
    const keys = [...new Set(runs().flatMap((run) => Object.keys(run.config)))].filter(
      (key) => new Set(runs().map((run) => run.config[key])).size > 1 && key !== "checkpoint_path",
    );
    const rows = keys.map((key) => ({
      key: el("code", {}, key),
      ...Object.fromEntries(
        runs().map((run, i) => [
          `r${i}`,
          el("code", {}, run.config[key] === undefined ? "–" : run.config[key]),
        ]),
      ),
    }));
    return panel(
      el("h3", {}, "Keys that differ"),
      keys.length
        ? table([["key", "Key"], ...runs().map((run, i) => [`r${i}`, run.name])], rows)
        : el("p", { class: "over" }, "None but the directory."),
    );
  }

  // ---- sweeps

  function sweepPage(sweep) {
    const metric = words(sweep.metric || "value"),
      done = sweep.jobs.filter((job) => job.value !== null);
    const better = (a, b) => (sweep.lower ? a - b : b - a),
      best = [...done].sort((a, b) => better(a.value, b.value))[0];
    const states = Object.entries(
      sweep.jobs.reduce((sum, job) => ({ ...sum, [job.state]: (sum[job.state] || 0) + 1 }), {}),
    )
      .map(([state, count]) => `${count} ${state}`)
      .join(", ");
    const top = el(
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
            `Best ${metric}`,
            valueOf(sweep.metric, best.value),
            `job ${best.number}${sweep.keys.length ? `: ${sweep.keys.map((key) => `${key}=${best.keys[key] ?? "–"}`).join(" ")}` : ""}`,
            null,
            true,
          ),
        figure("Jobs", format(sweep.jobs.length), states),
        figure(
          "Time",
          duration(sweep.jobs.reduce((sum, job) => sum + (job.seconds || 0), 0)),
          "of training, all jobs together",
        ),
      ),
    );
    return [
      top,
      ...[
        sweepTable(sweep, metric),
        sweepParallel(sweep, metric, done),
        sweepScatter(sweep, metric, done),
      ].filter(Boolean),
    ];
  }

  function sweepTable(sweep, metric) {
    const columns = [
      ["number", "Job"],
      ...sweep.keys.map((key) => [`keys.${key}`, key]),
      ["state", "State"],
      ["value", metric],
      ["best", "Best"],
      ["step", "Steps"],
      ["seconds", "Time"],
      ["directory", "Directory"],
    ];
    const get = (job, key) => (key.startsWith("keys.") ? job.keys[key.slice(5)] : job[key]);
    const shown = (job, key) => {
      const value = get(job, key);
      return key === "state"
        ? pill(value)
        : key === "seconds"
          ? value === null
            ? "–"
            : duration(value)
          : key === "value" || key === "best"
            ? valueOf(sweep.metric, value)
            : key === "directory"
              ? el("code", {}, value)
              : typeof value === "number"
                ? format(value)
                : (value ?? "–");
    };
    const body = el("tbody", {}),
      heads = [];
    let [by, down] = ["value", !sweep.lower];
    const sort = () => {
      const known = (value) => value !== null && value !== undefined && value !== "";
      const number = (value) =>
        typeof value === "number"
          ? value
          : value !== "" && !Number.isNaN(Number(value))
            ? Number(value)
            : null;
      const order = [...sweep.jobs].sort((a, b) => {
        const [x, y] = [get(a, by), get(b, by)];
        if (!known(x) || !known(y)) return known(y) - known(x);
        const [p, q] = [number(x), number(y)];
        return (
          (p !== null && q !== null ? p - q : String(x).localeCompare(String(y))) * (down ? -1 : 1)
        );
      });
      body.replaceChildren(
        ...order.map((job) =>
          el(
            "tr",
            { id: `job-${job.number}` },
            columns.map(([key]) => el("td", {}, shown(job, key))),
          ),
        ),
      );
      heads.forEach((head, i) =>
        head.setAttribute(
          "aria-sort",
          columns[i][0] === by ? (down ? "descending" : "ascending") : "none",
        ),
      );
    };
    heads.push(
      ...columns.map(([key, title]) =>
        el(
          "th",
          { scope: "col" },
          el(
            "button",
            {
              type: "button",
              class: "sort",
              onclick: () => {
                down =
                  by === key ? !down : key === "value" || key === "best" ? !sweep.lower : false;
                by = key;
                sort();
              },
            },
            title,
          ),
        ),
      ),
    );
    sort();
    return section(
      "jobs",
      "Jobs",
      "",
      panel(
        el(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "jobs" },
          el("table", { class: "sortable" }, el("thead", {}, el("tr", {}, heads)), body),
        ),
      ),
    );
  }

  // a key's place on an axis: numbers by size, by their logarithm where they span a decade, words side by side
  function keyScale(values) {
    const numeric = values.map(Number),
      all = numeric.every((value, i) => Number.isFinite(value) && values[i] !== "");
    if (!all) {
      const words = [...new Set(values.map(String))].sort();
      return {
        at: (value) => (words.length > 1 ? words.indexOf(String(value)) / (words.length - 1) : 0.5),
        ends: words,
        words,
      };
    }
    const [low, high] = [Math.min(...numeric), Math.max(...numeric)],
      log = low > 0 && high / low >= 10;
    const go = (value) => (log ? Math.log(value) : Number(value));
    return {
      at: (value) => (high > low ? (go(value) - go(low)) / (go(high) - go(low)) : 0.5),
      low,
      high,
      log,
      values: [...new Set(numeric)],
    };
  }
  function shade(sweep, done, job) {
    const order = [...new Set(done.map((each) => each.value))].sort((a, b) =>
        sweep.lower ? b - a : a - b,
      ),
      rank = order.length > 1 ? order.indexOf(job.value) / (order.length - 1) : 1;
    return `color-mix(in oklab, var(--c1) ${Math.round(100 * rank)}%, var(--c5))`;
  }

  function sweepParallel(sweep, metric, done) {
    if (sweep.keys.length < 2 || done.length < 2) return null;
    const axes = [
      ...sweep.keys.map((key) => ({ title: key, get: (job) => job.keys[key] ?? "", show: short })),
      {
        title: metric,
        get: (job) => job.value,
        show: isShare(sweep.metric) ? percent : short,
        ends: true,
      },
    ];
    for (const axis of axes) axis.scale = keyScale(done.map(axis.get));
    const place = el("div", { class: "chart" }),
      told = el(
        "p",
        { class: "over told", role: "status" },
        "Point at a line, or move with the arrow keys.",
      );
    const draw = (width) => {
      const height = 320,
        top = 34,
        bottom = height - 26,
        x = (i) => 56 + (i * (width - 130)) / (axes.length - 1),
        y = (axis, job) => bottom - axis.scale.at(axis.get(job)) * (bottom - top);
      const root = svg("svg", {
        viewBox: `0 0 ${width} ${height}`,
        height,
        role: "img",
        tabindex: 0,
        "aria-label": "Parallel coordinates of all jobs",
      });
      const labels = []; // above the lines
      axes.forEach((axis, i) => {
        root.append(
          svg("line", { class: "base", x1: x(i), x2: x(i), y1: top, y2: bottom }),
          svg("text", { x: x(i), y: 16, "text-anchor": "middle", class: "axis-title" }, axis.title),
        );
        const place = i ? { x: x(i) + 7 } : { x: x(i) - 7, "text-anchor": "end" };
        const label = (value, text) => {
          const y = bottom - axis.scale.at(value) * (bottom - top) + 4;
          labels.push(svg("text", { ...place, y, class: "halo" }, text));
        };
        const { words, values, low, high } = axis.scale;
        if (words) words.slice(0, 12).forEach((word) => label(word, word));
        else
          for (const value of axis.ends || values.length > 6 ? [low, high] : values)
            label(value, axis.show(value));
      });
      const lines = done.map((job) => {
        const path = svg("path", {
          class: "job",
          d: `M${axes.map((axis, i) => `${x(i).toFixed(1)} ${y(axis, job).toFixed(1)}`).join("L")}`,
          style: `stroke:${shade(sweep, done, job)}`,
        });
        path.addEventListener("pointerenter", () => tell(job));
        return path;
      });
      const tell = (job) => {
        lines.forEach((path, i) => path.classList.toggle("chosen", done[i] === job));
        told.textContent = `Job ${job.number}: ${sweep.keys.map((key) => `${key}=${job.keys[key] ?? "–"}`).join(", ")} → ${metric} ${valueOf(sweep.metric, job.value)}`;
      };
      let at = -1;
      root.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (step) {
          event.preventDefault();
          at = (at + step + done.length) % done.length;
          tell(done[at]);
        }
      });
      root.prepend(...lines);
      root.append(...labels);
      place.replaceChildren(root);
    };
    new ResizeObserver(() => {
      if (place.clientWidth) draw(Math.max(place.clientWidth, 90 * axes.length));
    }).observe(place);
    return section(
      "parallel",
      "All keys at once",
      `Each line is a job. Blue jobs have the better ${metric}, orange ones the worse.`,
      panel(el("div", { class: "scroll" }, place), told),
    );
  }

  function sweepScatter(sweep, metric, done) {
    if (!sweep.keys.length || done.length < 2) return null;
    const place = el("div", {});
    const draw = (key) => {
      const scale = keyScale(done.map((job) => job.keys[key] ?? "")),
        jobs = [...done].sort((a, b) => scale.at(a.keys[key] ?? "") - scale.at(b.keys[key] ?? ""));
      const x = jobs.map((job) =>
        scale.words
          ? scale.words.indexOf(String(job.keys[key] ?? ""))
          : scale.log
            ? Math.log10(job.keys[key])
            : Number(job.keys[key]),
      );
      const back = (value) =>
        scale.words
          ? (scale.words[Math.round(value)] ?? "")
          : short(scale.log ? 10 ** value : value);
      place.replaceChildren();
      chart(place, {
        title: `${metric} by ${key}`,
        height: 280,
        xLabel: key,
        xName: key,
        xFormat: back,
        xValue: back,
        yFormat: (value) => valueOf(sweep.metric, value),
        yTick: isShare(sweep.metric) ? percent : undefined,
        pad: true,
        xTicks: scale.words || new Set(x).size <= 8 ? () => [...new Set(x)] : undefined,
        series: jobs.map((job, i) => ({
          name: `job ${job.number}`,
          color: shade(sweep, done, job),
          x: [x[i]],
          y: [job.value],
          dots: true,
          radius: 5,
        })),
      });
    };
    const keys = [...sweep.keys].sort((a, b) => (a === "seed") - (b === "seed"));
    const choice = el(
      "select",
      { onchange: (event) => draw(event.target.value) },
      keys.map((key) => el("option", { value: key }, key)),
    );
    page.later.push(() => draw(keys[0]));
    return section(
      "scatter",
      "One key",
      "",
      el("div", { class: "controls" }, el("label", {}, "Key", choice)),
      panel(place),
    );
  }

  // ---- start

  // what one part of the page cannot draw must not take the others with it
  function attempt(part, given) {
    try {
      return part(given);
    } catch (error) {
      console.error(error);
      return el("p", { class: "empty" }, `A part of this page cannot be drawn (${error.message}).`);
    }
  }

  function start() {
    page.payload = JSON.parse(document.getElementById("payload").textContent);
    page.later = [];
    const body = el("main", {}),
      { sweep } = page.payload;
    let parts;
    if (sweep) {
      page.payload.runs = sweep.runs || [];
      parts = [attempt(sweepPage, sweep)].flat();
    } else {
      runs().forEach((run, i) => {
        run.color = COLORS[i % 8];
      });
      const [run] = runs();
      parts = (
        several()
          ? [headOfSeveral, comparedSection, curvesSection, speedSection, filesSection]
          : [
              head,
              curvesSection,
              scenesSection,
              speedSection,
              sameSection,
              picturesSection,
              filesSection,
            ]
      ).map((part) => attempt(part, run));
    }
    if (sweep && runs().length) {
      runs().forEach((run, i) => {
        run.color = COLORS[i % 8];
      });
      parts.push(curvesSection());
    }
    body.append(...parts.filter(Boolean));
    document
      .getElementById("page")
      .append(
        bar(),
        body,
        el("footer", {}, `Made ${day(page.payload.made)} from the files of the run directory.`),
      );
    for (const later of page.later) later();
  }

  return { el, svg, format, short, bytes, duration, percent, words, chart, start };
})();
window.lockstep = lockstep;
