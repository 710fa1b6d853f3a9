/* The book's two explorers: the price of a run, and the noise-corrected curvature.

   Plain JavaScript: no library, no network, works from a file. The numbers are in explore_accounting.js and
   explore_curvature.js, which tools/explorers.py writes. Pages hold an empty <div> for each explorer; everything is built
   here, so that a page without JavaScript shows no dead controls. The functions that compute are in `window.explorers`,
   where the tests compare them with dpivon. */
(() => {
  "use strict";

  // ------------------------------------------------------------- elements

  const SVG = "http://www.w3.org/2000/svg";

  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
    return node;
  };
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const sv = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // A symbol of the book: a letter in italics, and an index that is upright.
  const symbol = (letter, index) => el("span", { class: "ex-symbol" }, el("i", {}, letter), index && el("sub", {}, index));
  const svSymbol = (letter, index) => [
    sv("tspan", { class: "ex-letter" }, letter),
    index && sv("tspan", { dy: 3, "font-size": "0.75em" }, index),
    index && sv("tspan", { dy: -3 }, "\u200b"),
  ];

  // -------------------------------------------------------------- numbers

  const grouped = (number) => String(number).replace(/^\d{4,}$/, (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ","));

  /** A number for a reader: three digits, 12,345 with commas, 0.0012 as it is, below that as a power of ten. */
  function show(x, digits = 3) {
    if (x === 0) return "0";
    const size = Math.floor(Math.log10(Math.abs(Number(x.toPrecision(digits)))));
    if (size >= -4 && size < 7) return grouped(Number(x.toPrecision(digits)));
    const power = String(size).replace(/[-\d]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
    const factor = Number((x / 10 ** size).toPrecision(2));
    return factor === 1 ? `10${power}` : `${factor} × 10${power}`;
  }

  /** A factor for a reader: "12 times" or "1/12 of". */
  const factor = (x) => (x >= 0.995 ? show(x, 2) : `1/${show(1 / x, 2)}`);

  const near = (values, wanted) =>
    values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);

  // ------------------------------------------------------------- controls

  let count = 0;

  /** A slider over a list of values; `words(value)` is what it says, to the eye and to a screen reader. */
  function slider(label, values, words, changed) {
    const id = `explorer-slider-${++count}`;
    const said = el("span", { class: "ex-value", "aria-hidden": "true" });
    const input = el("input", { type: "range", id, min: 0, max: values.length - 1, step: 1, oninput: () => {
      refresh();
      changed();
    } });
    const big = Math.max(2, Math.round(values.length / 10));
    input.addEventListener("keydown", (event) => {
      const move = { PageUp: big, PageDown: -big }[event.key];
      if (!move) return;
      event.preventDefault();
      control.set(values[Math.min(values.length - 1, Math.max(0, Number(input.value) + move))]);
      changed();
    });
    const refresh = () => {
      const text = words(values[input.value]);
      said.textContent = text;
      input.setAttribute("aria-valuetext", text);
      input.style.setProperty("--ex-part", `${(100 * input.value) / (values.length - 1)}%`);
    };
    const control = {
      root: el("div", { class: "ex-control" }, el("label", { for: id }, label), said, input),
      input,
      values,
      refresh,
      get value() {
        return values[input.value];
      },
      set(value) {
        input.value = near(values, value);
        refresh();
      },
    };
    return control;
  }

  /** One of a few: radio buttons, in a row or below each other. */
  function choice(legend, options, changed, stacked) {
    const name = `explorer-choice-${++count}`;
    const buttons = options.map(([value, label]) => [
      el("input", { type: "radio", name, value, onchange: changed }),
      label,
    ]);
    return {
      root: el(
        "fieldset",
        { class: `ex-choice${stacked ? " ex-stacked" : ""}` },
        el("legend", {}, legend),
        el("div", {}, buttons.map(([input, label]) => el("label", {}, input, el("span", {}, label)))),
      ),
      get value() {
        return buttons.find(([input]) => input.checked)[0].value;
      },
      set(value) {
        const found = buttons.find(([input]) => input.value === String(value)) || buttons[0];
        found[0].checked = true;
      },
    };
  }

  function menu(label, options, changed) {
    const id = `explorer-menu-${++count}`;
    const select = el("select", { id, onchange: changed }, options.map(([value, text]) => el("option", { value }, text)));
    return {
      root: el("div", { class: "ex-control ex-menu" }, el("label", { for: id }, label), select),
      get value() {
        return select.value;
      },
      set(value) {
        if (options.some(([known]) => String(known) === String(value))) select.value = value;
      },
    };
  }

  // A number with its name; what is too long for a number is words.
  function reading(name, kind = "") {
    const number = el("span", { class: "ex-number" });
    const note = el("span", { class: "ex-note" });
    return {
      root: el("div", { class: `ex-reading ${kind}` }, el("span", { class: "ex-name" }, name), number, note),
      set(text, more) {
        number.textContent = text;
        number.classList.toggle("ex-words", /[a-z]{3}/.test(text));
        note.textContent = more || "";
      },
    };
  }

  /** The sentence that says what the numbers mean; a screen reader hears it when the slider rests. */
  function sentence() {
    const output = el("output", { "aria-live": "polite", class: "ex-sentence" });
    let timer;
    let spoken;
    return {
      root: output,
      set(text) {
        clearTimeout(timer);
        const say = () => {
          spoken = true;
          output.textContent = text;
        };
        if (spoken) timer = setTimeout(say, 200);
        else say();
      },
    };
  }

  const table = (caption) => {
    const body = el("table", { class: "table" });
    return {
      root: el("details", { class: "ex-table" }, el("summary", {}, caption), el("div", { tabindex: 0, role: "region", "aria-label": caption }, body)),
      set(head, rows) {
        body.replaceChildren(
          el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))),
          el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell))))),
        );
      },
    };
  };

  /** State in the address: what follows the # as name=value; written only after a reader has changed something. */
  const address = {
    read() {
      const text = location.hash.slice(1);
      return text.includes("=") ? Object.fromEntries(new URLSearchParams(text)) : {};
    },
    write(state) {
      history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    },
    follow(restore) {
      // A link to a heading of the page is no setting.
      window.addEventListener("hashchange", () => location.hash.includes("=") && restore(address.read()));
    },
  };

  // -------------------------------------------------------------- figures

  /** Axes on logarithmic scales: places for values, a frame, grid lines, tick labels. */
  function axes({ width, height, left, right, top, bottom, x, y }) {
    const place = (range, low, high) => (value) =>
      low + ((high - low) * Math.log(value / range[0])) / Math.log(range[1] / range[0]);
    const X = place(x.range, left, width - right);
    const Y = place(y.range, height - bottom, top);
    const inside = ([low, high], value) => value >= low * 0.999 && value <= high * 1.001;
    const marks = [];
    for (const [value, label] of x.ticks.filter(([value]) => inside(x.range, value))) {
      marks.push(sv("line", { class: "ex-grid", x1: X(value), x2: X(value), y1: top, y2: height - bottom }));
      marks.push(sv("text", { x: X(value), y: height - bottom + 17, "text-anchor": "middle" }, label));
    }
    for (const [value, label] of y.ticks.filter(([value]) => inside(y.range, value))) {
      marks.push(sv("line", { class: "ex-grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }));
      marks.push(sv("text", { x: left - 7, y: Y(value) + 4, "text-anchor": "end" }, label));
    }
    marks.push(sv("line", { class: "ex-axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    marks.push(sv("line", { class: "ex-axis", x1: left, x2: left, y1: top, y2: height - bottom }));
    return { X, Y, marks };
  }

  const path = (points, X, Y) => {
    let d = "";
    let pen = false;
    for (const [x, y] of points) {
      if (y == null || !Number.isFinite(y)) pen = false;
      else {
        d += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
        pen = true;
      }
    }
    return d;
  };

  /** A figure that is drawn again when its width changes. */
  function figure(draw) {
    const titled = `explorer-figure-${++count}`;
    const title = sv("title", { id: `${titled}-title` });
    const desc = sv("desc", { id: `${titled}-text` });
    const group = sv("g");
    const root = sv("svg", { class: "ex-figure", role: "img", "aria-labelledby": `${titled}-title ${titled}-text` }, title, desc, group);
    const shown = { root, width: 0 };
    shown.draw = () => {
      const width = Math.max(280, Math.round(root.parentElement ? root.parentElement.clientWidth : 600));
      const { height, marks, says } = draw(width, shown);
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.style.aspectRatio = `${width} / ${height}`;
      title.textContent = says[0];
      desc.textContent = says[1];
      group.replaceChildren(...marks.flat(Infinity).filter(Boolean));
      shown.width = width;
    };
    new ResizeObserver(() => {
      if (root.parentElement && Math.abs(root.parentElement.clientWidth - shown.width) > 1 && root.parentElement.clientWidth) shown.draw();
    }).observe(root);
    return shown;
  }

  // --------------------------------------------- accounting: the arithmetic

  /** Lagrange's polynomial through up to four points, those that are not missing. */
  function through(x, xs, ys) {
    let sum = 0;
    for (let i = 0; i < xs.length; i++) {
      let weight = ys[i];
      for (let j = 0; j < xs.length; j++) if (j !== i) weight *= (x - xs[j]) / (xs[i] - xs[j]);
      sum += weight;
    }
    return sum;
  }

  // ln n! up to the largest order.
  const LN_FACTORIAL = [0];
  const lnFactorial = (n) => {
    while (LN_FACTORIAL.length <= n) LN_FACTORIAL.push(LN_FACTORIAL.at(-1) + Math.log(LN_FACTORIAL.length));
    return LN_FACTORIAL[n];
  };

  /** ln E_Q[(P/Q)^order], of one step of the subsampled Gaussian, for a whole order: a binomial sum. */
  function moment(order, sigma, q) {
    const [inside, outside, twice] = [Math.log(q), Math.log1p(-q), 2 * sigma * sigma];
    const terms = new Float64Array(order + 1);
    let most = -Infinity;
    for (let k = 0; k <= order; k++) {
      terms[k] = lnFactorial(order) - lnFactorial(k) - lnFactorial(order - k) + k * inside + (order - k) * outside + (k * (k - 1)) / twice;
      if (terms[k] > most) most = terms[k];
    }
    let sum = 0;
    for (let k = 0; k <= order; k++) if (terms[k] > most - 40) sum += Math.exp(terms[k] - most);
    return most + Math.log(sum);
  }

  /** The same for an order that is not whole: the integral, by the trapezoidal rule, which is exact enough for bells. */
  function integral(sigma, q, largest) {
    const [step, twice] = [sigma / 2, 2 * sigma * sigma];
    const points = [];
    for (let x = -9 * sigma; x < largest + 9 * sigma; x += step) {
      const loss = (2 * x - 1) / twice; // of the examples that took part
      points.push([(-x * x) / twice, loss > 30 ? Math.log(q) + loss : Math.log1p(q * Math.expm1(loss))]);
    }
    return (order) => {
      let most = -Infinity;
      for (const [bell, loss] of points) most = Math.max(most, bell + order * loss);
      let sum = 0;
      for (const [bell, loss] of points) sum += Math.exp(bell + order * loss - most);
      return most + Math.log((sum * step) / (sigma * Math.sqrt(2 * Math.PI)));
    };
  }

  const divergences = new Map();

  /** Pairs (order, Rényi divergence of one step) for the accountant's orders. */
  function renyi(sigma, q, orders) {
    const key = `${sigma} ${q}`;
    if (!divergences.has(key)) {
      if (divergences.size > 4000) divergences.clear();
      const broken = integral(sigma, q, Math.max(...orders.filter((order) => !Number.isInteger(order))));
      divergences.set(key, orders.map((order) =>
        [order, (Number.isInteger(order) ? moment(order, sigma, q) : broken(order)) / (order - 1)]));
    }
    return divergences.get(key);
  }

  /** Epsilon by RDP: the best order's divergence of all steps, exchanged for epsilon at delta. */
  function epsilonRdp(sigma, q, steps, data) {
    const least = renyi(sigma, q, data.orders).reduce((best, [order, rho]) => {
      const price = steps * rho + (Math.log(1 / data.delta) - Math.log(order)) / (order - 1) + Math.log((order - 1) / order);
      return Math.min(best, price);
    }, Infinity);
    return Math.max(0, least);
  }

  /** Epsilon by PRV, interpolated between the accountant's values in logarithms; null outside of them. */
  function epsilonPrv(sigma, q, steps, data) {
    const wanted = [q, sigma, steps].map(Math.log);
    const grid = (data.logs ||= [data.rates, data.noises, data.steps].map((nodes) => nodes.map(Math.log)));
    const cells = grid.map((nodes, axis) => {
      const x = wanted[axis];
      if (x < nodes[0] - 1e-9 || x > nodes.at(-1) + 1e-9) return null;
      return Math.min(nodes.length - 2, Math.max(0, nodes.findLastIndex((node) => node <= x)));
    });
    if (cells.includes(null)) return null;
    const value = (axis, offset) => {
      if (axis === 3) {
        const stored = data.prv[offset];
        return stored == null ? NaN : stored / data.resolution;
      }
      const nodes = grid[axis];
      const cell = cells[axis];
      const xs = [];
      const ys = [];
      for (let i = Math.max(0, cell - 1); i <= Math.min(nodes.length - 1, cell + 2); i++) {
        const y = value(axis + 1, offset * nodes.length + i);
        if (Number.isNaN(y)) {
          if (i === cell || i === cell + 1) return NaN; // a corner is missing: nothing is extrapolated
        } else {
          xs.push(nodes[i]);
          ys.push(y);
        }
      }
      return through(wanted[axis], xs, ys);
    };
    const found = value(0, 0);
    return Number.isNaN(found) ? null : Math.exp(found);
  }

  // ------------------------------------------------- accounting: the page

  const MOST = 20; // an epsilon above this is no promise worth a number
  const LEAST = 0.05;

  const spell = (epsilon) => (epsilon > MOST ? `more than ${MOST}` : epsilon < LEAST ? `below ${LEAST}` : show(epsilon));

  function series(low, high, factors) {
    const found = [];
    for (let scale = 1; scale <= high * 10; scale *= 10)
      for (const f of factors) if (scale * f >= low && scale * f <= high) found.push(scale * f);
    return found;
  }

  function ladder(...parts) {
    // [from, step, to) pieces of an even ladder, without rounding dust.
    return parts.flatMap(([from, step, to]) =>
      Array.from({ length: Math.round((to - from) / step) }, (_, i) => Number((from + i * step).toFixed(3))));
  }

  const NOISES = [...ladder([0.5, 0.05, 2], [2, 0.1, 4], [4, 0.25, 8], [8, 0.5, 20]), 20];
  const BATCHES = Array.from({ length: 41 }, (_, i) => 2 ** Math.floor(i / 4) * [16, 20, 24, 28][i % 4]);
  const PASSES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200];
  const UPDATES = series(10, 20_000, [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]).map(Math.round);

  function exploreAccounting(root, data) {
    const start = { n: 50_000, b: 512, sigma: 1, count: "epochs", epochs: 10, steps: 1000, along: "sigma", kept: "" };
    const changed = () => {
      render();
      address.write(state());
    };
    const n = menu("Private examples, N", [[1438, "1,438 (digits)"], [10_000, "10,000"], [50_000, "50,000 (CIFAR-10)"]], changed);
    const b = slider(["Expected batch size ", symbol("b")], BATCHES, (v) => `${show(v, 6)} examples`, changed);
    const sigma = slider(["Noise multiplier ", symbol("σ", "p")], NOISES, (v) => `${v} times C`, changed);
    const mode = choice("Length of the run in", [["epochs", "epochs"], ["steps", "steps"]], () => {
      const run = current(); // the same run, counted the other way
      if (mode.value === "steps") steps.set(Math.round(epochs.value / run.q));
      else epochs.set(steps.value * run.q);
      changed();
    });
    const epochs = slider("Epochs", PASSES, (v) => (v === 1 ? "1 pass" : `${v} passes`), changed);
    const steps = slider(["Steps ", symbol("T")], UPDATES, (v) => `${show(v, 6)} steps`, changed);
    const along = choice("Curve against", [["sigma", "noise"], ["b", "batch size"], ["length", "length"]], changed);

    const prv = reading([symbol("ε"), " by PRV"], "ex-blue");
    const rdp = reading([symbol("ε"), " by RDP"], "ex-orange");
    const rate = reading(["rate, ", symbol("q"), " = ", symbol("b"), "/", symbol("N")]);
    const noise = reading(["noise, ", symbol("σ", "p"), symbol("C"), "/", symbol("b")]);
    const says = sentence();
    const rows = table("The curve as a table");
    const command = el("code", {});

    let kept = null;
    const keep = el("button", { type: "button", onclick: () => {
      kept = kept ? null : current();
      changed();
    } });
    const budgets = [0.5, 1, 3, 8].map((budget) =>
      el("button", { type: "button", "aria-label": `Choose the noise for epsilon ${budget}`, onclick: () => {
        const run = current();
        const enough = NOISES.find((s) => epsilonRdp(s, run.q, run.steps, data) <= budget);
        sigma.set(enough || NOISES.at(-1));
        changed();
      } }, String(budget)));

    const lengthOf = (q, counted, value) => (counted === "epochs" ? Math.max(1, Math.round(value / q)) : value);

    function current() {
      const N = Number(n.value);
      const counted = mode.value;
      const length = counted === "epochs" ? epochs.value : steps.value;
      const q = b.value / N;
      return { N, b: b.value, q, sigma: sigma.value, counted, length, steps: lengthOf(q, counted, length) };
    }

    const state = () => ({
      n: n.value, b: b.value, sigma: sigma.value, [mode.value]: mode.value === "epochs" ? epochs.value : steps.value, along: along.value,
      ...(kept && { kept: [kept.N, kept.b, kept.sigma, kept.counted, kept.length].join("_") }),
    });

    function restore(given) {
      const all = { ...start, ...given };
      n.set(all.n);
      b.set(Number(all.b) || start.b);
      sigma.set(Number(all.sigma) || start.sigma);
      mode.set(given.steps ? "steps" : "epochs");
      epochs.set(Number(all.epochs) || start.epochs);
      steps.set(Number(all.steps) || start.steps);
      along.set(all.along);
      const [N, batch, s, counted, length] = all.kept.split("_");
      kept = null;
      if (Number(N) && Number(batch) && Number(s) && Number(length)) {
        const q = Number(batch) / Number(N);
        const same = counted === "steps" ? "steps" : "epochs";
        kept = { N: Number(N), b: Number(batch), q, sigma: Number(s), counted: same, length: Number(length), steps: lengthOf(q, same, Number(length)) };
      }
      render();
    }

    // The run with one quantity changed.
    function varied(run, x) {
      if (along.value === "sigma") return { ...run, sigma: x };
      if (along.value === "b") {
        const q = x / run.N;
        return { ...run, b: x, q, steps: lengthOf(q, run.counted, run.length) };
      }
      return { ...run, length: x, steps: lengthOf(run.q, run.counted, x) };
    }

    const AXES = {
      sigma: { values: NOISES, ticks: [0.5, 1, 2, 5, 10, 20], of: (run) => run.sigma, name: ["noise multiplier ", svSymbol("σ", "p")], says: "the noise multiplier", control: () => sigma },
      b: { values: BATCHES, ticks: [16, 64, 256, 1024, 4096, 16384], of: (run) => run.b, name: ["expected batch size ", svSymbol("b")], says: "the batch size", control: () => b },
      epochs: { values: PASSES, ticks: [1, 2, 5, 10, 20, 50, 100, 200], of: (run) => run.length, name: ["epochs"], says: "the number of epochs", control: () => epochs },
      steps: { values: UPDATES, ticks: [10, 100, 1000, 10000], of: (run) => run.length, name: ["steps ", svSymbol("T")], says: "the number of steps", control: () => steps },
    };
    const axis = (run) => AXES[along.value === "length" ? run.counted : along.value];

    // Epsilon by both accountants, null where it is off the scale or not stored.
    function prices(run) {
      if (!(run.q > 0 && run.q < 1) || run.steps < 1) return { rdp: null, prv: null };
      const byRdp = epsilonRdp(run.sigma, run.q, run.steps, data);
      return { rdp: byRdp, prv: epsilonPrv(run.sigma, run.q, run.steps, data) };
    }
    const visible = (epsilon) => (epsilon != null && epsilon <= MOST * 1.2 && epsilon >= LEAST * 0.8 ? epsilon : null);

    const EPSILONS = [0.1, 0.3, 1, 3, 10];

    const picture = figure((width, shown) => {
      const run = current();
      const { values, ticks, of, name, says: against } = axis(run);
      const narrow = width < 430;
      const height = narrow ? 330 : 370;
      const box = { width, height, left: 38, right: narrow ? 44 : 58, top: 28, bottom: 42 };
      const few = narrow ? ticks.filter((_, i) => ticks.length < 6 || i % 2 === 0 || ticks[i] === ticks.at(-1)) : ticks;
      const { X, Y, marks } = axes({
        ...box,
        x: { range: [values[0], values.at(-1)], ticks: few.map((value) => [value, show(value, 6)]) },
        y: { range: [LEAST, MOST * 1.25], ticks: EPSILONS.map((value) => [value, String(value)]) },
      });
      Object.assign(shown, { X, values, control: axis(run).control() });
      // What an epsilon means, on the right: how often the best guess is right.
      for (const value of EPSILONS)
        marks.push(sv("text", { class: "ex-soft", x: width - box.right + 6, y: Y(value) + 4 }, `${right(value)}`));
      marks.push(sv("text", { x: 2, y: 14 }, svSymbol("ε")));
      marks.push(sv("text", { class: "ex-soft", x: width - 2, y: 14, "text-anchor": "end" }, "right guesses of 100, at most"));
      marks.push(sv("text", { x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle" }, name));
      // Enough points for a smooth line, and the chosen one among them.
      const dense = values.filter((value, i) => value === of(run) || i === values.length - 1 || i % Math.ceil(values.length / 48) === 0);
      const curve = dense.map((x) => [x, prices(varied(run, x))]);
      if (kept) {
        const old = dense.map((x) => [x, visible(prices(varied(kept, x)).rdp)]);
        marks.push(sv("path", { class: "ex-kept", d: path(old, X, Y) }));
        const there = visible(prices(kept).rdp);
        if (there && of(kept) >= values[0] && of(kept) <= values.at(-1)) marks.push(sv("circle", { class: "ex-kept-dot", cx: X(of(kept)), cy: Y(there), r: 5 }));
      }
      marks.push(sv("path", { class: "ex-line ex-orange", d: path(curve.map(([x, p]) => [x, visible(p.rdp)]), X, Y) }));
      marks.push(sv("path", { class: "ex-line ex-blue", d: path(curve.map(([x, p]) => [x, visible(p.prv)]), X, Y) }));
      const now = prices(run);
      const here = of(run);
      const ys = [now.rdp, now.prv].map((p) => (p != null && p <= MOST * 1.25 && p >= LEAST ? Y(p) : null));
      marks.push(sv("line", { class: "ex-here", x1: X(here), x2: X(here), y1: box.top, y2: height - box.bottom }));
      if (ys[0] != null) marks.push(sv("circle", { class: "ex-dot ex-orange", cx: X(here), cy: ys[0], r: 6 }));
      if (ys[1] != null) marks.push(sv("rect", { class: "ex-dot ex-blue", x: X(here) - 5, y: ys[1] - 5, width: 10, height: 10, transform: `rotate(45 ${X(here)} ${ys[1]})` }));
      // The key lies where the curve is not: curves against noise fall, all others rise.
      const falls = along.value === "sigma";
      const keyX = falls ? width - box.right - 78 : box.left + 14;
      const entries = [["RDP", "ex-orange"], ["PRV", "ex-blue"], ...(kept ? [["kept", "ex-kept"]] : [])];
      entries.forEach(([text, kind], i) => {
        marks.push(sv("line", { class: kind === "ex-kept" ? kind : `ex-line ${kind}`, x1: keyX, x2: keyX + 26, y1: box.top + 14 + 19 * i, y2: box.top + 14 + 19 * i }));
        marks.push(sv("text", { x: keyX + 33, y: box.top + 18 + 19 * i }, text));
      });
      return {
        height,
        marks,
        says: [
          `Epsilon against ${against}`,
          `Two curves on logarithmic axes, which ${falls ? "fall" : "rise"} from left to right; the one of PRV lies below the one of RDP. ` +
            `At ${show(here, 6)} epsilon is ${spell(now.rdp)} by RDP and ${now.prv == null ? "not known" : spell(now.prv)} by PRV.`,
        ],
      };
    });
    // A pointer moves the point along the curve; the keyboard has the slider.
    const drag = (event) => {
      const frame = picture.root.getBoundingClientRect();
      const x = ((event.clientX - frame.left) / frame.width) * picture.width;
      const places = picture.values.map(picture.X);
      picture.control.set(picture.values[near(places, x)]);
      changed();
    };
    picture.root.addEventListener("pointerdown", (event) => {
      picture.root.setPointerCapture(event.pointerId);
      drag(event);
    });
    picture.root.addEventListener("pointermove", (event) => event.buttons && drag(event));

    function right(epsilon) {
      const percent = (100 * (Math.exp(epsilon) + data.delta)) / (1 + Math.exp(epsilon));
      return percent >= 99.5 ? "> 99" : String(Math.ceil(percent - 1e-9));
    }

    function why(run, now) {
      const [low, high] = [data.rates[0], data.rates.at(-1)];
      if (run.q >= 1) return `A batch of ${show(run.b, 6)} of ${show(run.N, 6)} examples is all of them, or more: choose a smaller b.`;
      if (run.q < low || run.q > high)
        return `PRV is stored for sampling rates from ${show(low, 2)} to ${high}, and this one is ${show(run.q, 3)}: ask the command below.`;
      if (run.steps < data.steps[0] || run.steps > data.steps.at(-1))
        return `PRV is stored for ${data.steps[0]} to ${show(data.steps.at(-1), 6)} steps, and these are ${show(run.steps, 6)}: ask the command below.`;
      if (now.rdp > MOST) return `Above ${MOST} an epsilon is no promise that a number could describe, and the curves end.`;
      return "Here the stored values of PRV end: ask the command below.";
    }

    function render() {
      [n, b, sigma, epochs, steps].forEach((control) => control.refresh && control.refresh());
      const run = current();
      epochs.root.hidden = run.counted !== "epochs";
      steps.root.hidden = run.counted !== "steps";
      const now = prices(run);
      const known = now.rdp != null;
      rdp.set(known ? spell(now.rdp) : "—", "");
      prv.set(now.prv != null && now.rdp <= MOST ? spell(now.prv) : "—", "");
      rate.set(show(run.q), run.counted === "epochs" ? `${show(run.steps, 6)} steps` : `${show(run.steps * run.q)} epochs`);
      noise.set(`${show(run.sigma / run.b, 2)} C`, "what training feels");
      const what = `N = ${show(run.N, 6)}, b = ${show(run.b, 6)}, σₚ = ${run.sigma} and ${show(run.steps, 6)} steps`;
      const off = known && (now.rdp > MOST || now.rdp < LEAST);
      const best = now.prv != null && !off ? now.prv : now.rdp;
      let text;
      if (!known) text = why(run, now);
      else if (now.rdp > MOST) text = `With ${what} epsilon is more than ${MOST}. ${why(run, now)} More noise, fewer steps or smaller batches bring it back.`;
      else if (now.rdp < LEAST)
        text = `With ${what} epsilon is below ${LEAST}: a guess who took part would be right at most ${right(LEAST)} times in 100. There is room for less noise.`;
      else {
        const by = now.prv != null ? `(${spell(now.prv)}, 10⁻⁵)-private by PRV, and (${spell(now.rdp)}, 10⁻⁵) by RDP` : `(${spell(now.rdp)}, 10⁻⁵)-private by RDP. ${why(run, now)}`;
        text = `With ${what} a run is ${by}${now.prv != null ? "." : ""} A coin decides whether Alice’s example is in. Whoever sees all that the run releases guesses right at most ${right(best)} times in 100, where blind guesses are right 50 times.`;
      }
      says.set(text);
      keep.textContent = kept ? "Drop the kept curve" : "Keep this curve";
      const { values, of, says: against } = axis(run);
      const at = values.filter((value, i) => i % Math.ceil(values.length / 10) === 0 || value === of(run));
      rows.set([against.replace(/^the /, ""), "epsilon by RDP", "epsilon by PRV"], at.map((x) => {
        const p = prices(varied(run, x));
        return [`${show(x, 6)}${x === of(run) ? " (now)" : ""}`, p.rdp == null ? "—" : spell(p.rdp), p.prv == null || p.rdp > MOST ? "—" : spell(p.prv)];
      }));
      command.textContent = `python -m dpivon epsilon --noise-multiplier ${run.sigma} --batch-size ${run.b} --n ${run.N} --steps ${run.steps}`;
      picture.draw();
    }

    root.replaceChildren(
      el("div", { class: "ex-grid-wide" },
        el("div", { class: "ex-controls" }, n.root, b.root, sigma.root, mode.root, epochs.root, steps.root, along.root),
        el("div", { class: "ex-main" },
          el("div", { class: "ex-readings" }, prv.root, rdp.root, rate.root, noise.root),
          el("div", { class: "ex-picture" }, picture.root)),
      ),
      says.root,
      el("div", { class: "ex-actions" },
        el("span", { class: "ex-budgets", role: "group", "aria-label": "Noise for a budget, by RDP" }, el("span", {}, "Least noise for ", symbol("ε"), " ="), budgets),
        keep),
      el("p", { class: "ex-command" }, "The accountants themselves: ", command),
      rows.root,
      el("p", { class: "ex-fine" },
        "RDP is computed here, as a sum for each order. PRV needs long Fourier transforms: it is interpolated between " +
          `${show(data.prv.filter((v) => v != null).length, 6)} values of the accountant, and at ${data.checked} random runs was off by at most ${show(100 * data.error, 2)}%. `, symbol("δ", "p"), " is 10⁻⁵."),
    );
    restore(address.read());
    address.follow(restore);
  }

  // ---------------------------------------------------------- curvature

  /** The estimates of the shown weights, in units of s^2, for signal number k and averages number t. */
  function estimates(order, k, t, data) {
    if (order === "project") return data.projected[k][t];
    const a = data.signals[k];
    const average = data.u.map((u, j) => data.second[t][j] + 2 * a * u * data.first[t][j] + (a * u) ** 2);
    const [mean, share] = data.toward[k][t];
    return average.map((x) => Math.max(order === "average" ? x : mean + share * (x - mean), 0));
  }

  /** How far each shown weight steps, over how far it would with its true curvature; a posterior's width is the root. */
  function stretches(order, k, t, run, data) {
    const [b, C, sigma] = data.runs[run];
    const unit = data.ess * ((sigma * C) / b) ** 2;
    const a = data.signals[k];
    return estimates(order, k, t, data).map(
      (estimate, j) => (unit * (a * data.u[j]) ** 2 + data.damping) / (unit * estimate + data.damping));
  }

  const median = (values) => {
    const sorted = [...values].sort((x, y) => x - y);
    const half = sorted.length / 2;
    return Number.isInteger(half) ? (sorted[half - 1] + sorted[half]) / 2 : sorted[Math.floor(half)];
  };

  function exploreCurvature(root, data) {
    const start = { a: 0.1, steps: 1000, order: "project", run: 0 };
    const changed = () => {
      render();
      address.write({ a: a.value, steps: steps.value, order: order.value, run: run.value });
    };
    const a = slider(["Signal over noise, ", symbol("a"), " = |", symbol("μ"), "|/", symbol("s")], data.signals, (v) => `${v} of the noise`, changed);
    const steps = slider("Steps averaged", data.steps, (v) => (v === 1 ? "1 step" : `${show(v, 6)} steps`), changed);
    const ORDERS = {
      project: ["subtract, cut, then average", "cutting in each step", "paper"],
      average: ["subtract, average, then cut", "averaging first"],
      shrink: ["the same, shrunk toward the block", "shrinking toward the block"],
    };
    const order = choice("Order", Object.entries(ORDERS).map(([key, [label, , whose]]) => [key, [label, whose && el("small", {}, ` (the ${whose})`)].filter(Boolean)]).map(([key, label]) => [key, el("span", {}, label)]), changed, true);
    const run = menu("The run that it is part of", data.runs.map(([b, C, sigma], i) => [i, `b = ${b}, C = ${C}, σₚ = ${sigma}`]), changed);

    const mean = reading("mean estimate", "ex-blue");
    const ratio = reading("mean over truth");
    const zeros = reading("exactly zero");
    const ranks = reading("rank correlation");
    const says = sentence();
    const rows = table("The same for all numbers of steps, as a table");

    const LOW = 1e-7;
    const HIGH = 1e2;

    const scatter = figure((width) => {
      const [k, t] = [near(data.signals, a.value), near(data.steps, steps.value)];
      const narrow = width < 430;
      const base = Math.min(width, 470) - 44; // of the axes; below it the estimates that are zero
      const height = base + 70;
      const box = { width, height: base, left: narrow ? 44 : 50, right: narrow ? 14 : 20, top: 24, bottom: 0 };
      const powers = [-6, -4, -2, 0, 2].map((power) => [10 ** power, power < (narrow ? -2 : -4) ? `10⁻${"⁴⁶"[power < -4 ? 1 : 0]}` : grouped(10 ** power)]);
      const range = [LOW, HIGH];
      const { X, Y, marks } = axes({ ...box, x: { range, ticks: [] }, y: { range, ticks: powers } });
      const zeroY = base + 16;
      for (const [value, label] of powers) {
        marks.push(sv("line", { class: "ex-grid", x1: X(value), x2: X(value), y1: box.top, y2: base }));
        marks.push(sv("text", { x: X(value), y: base + 44, "text-anchor": "middle" }, label));
      }
      marks.push(sv("rect", { class: "ex-zero-strip", x: box.left, y: zeroY - 10, width: width - box.right - box.left, height: 20 }));
      marks.push(sv("text", { x: box.left - 7, y: zeroY + 4, "text-anchor": "end" }, "0"));
      marks.push(sv("text", { x: 2, y: 13 }, "estimate, in ", svSymbol("s"), "²"));
      marks.push(sv("text", { x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle" }, "truth, the squared signal, in ", svSymbol("s"), "²"));
      // The truth: an estimate on this line is right.
      marks.push(sv("path", { class: "ex-truth", d: path([[LOW, LOW], [HIGH, HIGH]], X, Y) }));
      const slope = (-Math.atan2(Y(LOW) - Y(HIGH), X(HIGH) - X(LOW)) * 180) / Math.PI;
      const [tx, ty] = [X(2e-6), Y(2e-6)];
      marks.push(sv("text", { class: "ex-soft", x: tx, y: ty - 7, transform: `rotate(${slope} ${tx} ${ty})` }, "right"));
      marks.push(sv("path", { class: "ex-floor", d: path([[LOW, data.floor], [HIGH, data.floor]], X, Y) }));
      marks.push(sv("text", { class: "ex-floor-name", x: box.left + 8, y: Y(data.floor) - 7 }, `the floor, ${data.floor.toFixed(4)} `, svSymbol("s"), "²"));
      // The exact mean for a weight of each signal.
      if (order.value !== "shrink") {
        const means = order.value === "project" ? data.mean.project : data.mean.average[t];
        marks.push(sv("path", { class: "ex-line ex-blue ex-thin", d: path(data.squares.map((x, i) => [10 ** x, Math.min(means[i], HIGH)]), X, Y) }));
      } else {
        const block = data.toward[k][t][0];
        if (block > LOW) marks.push(sv("path", { class: "ex-line ex-blue ex-thin", d: path([[LOW, block], [HIGH, block]], X, Y) }));
      }
      const found = estimates(order.value, k, t, data);
      found.forEach((estimate, j) => {
        const truth = (a.value * data.u[j]) ** 2;
        const zero = estimate === 0;
        marks.push(sv("circle", { class: `ex-weight${zero ? " ex-none" : ""}`, cx: X(truth), cy: zero ? zeroY : Y(Math.min(HIGH, Math.max(LOW, estimate))), r: 4 }));
      });
      return {
        height,
        marks,
        says: [
          "Estimated against true curvature",
          `${found.length} weights on logarithmic axes. On a dashed diagonal an estimate is right; a dotted level marks the floor, ${data.floor.toFixed(4)} s squared. ` +
            `The median estimate is ${show(median(found))} s squared, where the median truth is ${show(median(data.u.map((u) => (a.value * u) ** 2)))}; ${found.filter((x) => x === 0).length} of the weights are at exactly zero.`,
        ],
      };
    });

    const strip = figure((width) => {
      const [k, t] = [near(data.signals, a.value), near(data.steps, steps.value)];
      const found = stretches(order.value, k, t, Number(run.value), data);
      const narrow = width < 430;
      const height = 136;
      const [left, right, top, base] = [12, 12, 44, 96];
      const range = [1e-6, 1e6];
      const X = (value) => left + ((width - left - right) * (Math.log10(Math.min(range[1], Math.max(range[0], value))) + 6)) / 12;
      const marks = [];
      const name = (p) => (p === 0 ? "1" : p < 0 ? `1/${grouped(10 ** -p)}` : grouped(10 ** p));
      for (const power of narrow ? [-4, 0, 4] : [-4, -2, 0, 2, 4]) {
        const x = X(10 ** power);
        marks.push(sv("line", { class: power ? "ex-grid" : "ex-axis", x1: x, x2: x, y1: top - 8, y2: base }));
        marks.push(sv("text", { x, y: base + 17, "text-anchor": "middle" }, name(power)));
        marks.push(sv("text", { class: "ex-soft", x, y: top - 13, "text-anchor": "middle" }, name(power / 2)));
      }
      marks.push(sv("text", { class: "ex-soft", x: left, y: 13 }, "width of the posterior, over what it should be"));
      marks.push(sv("text", { x: left, y: height - 3 }, "length of the step, over what it should be"));
      marks.push(sv("line", { class: "ex-axis", x1: left, x2: width - right, y1: base, y2: base }));
      const none = estimates(order.value, k, t, data).map((estimate) => estimate === 0);
      found.forEach((value, j) => {
        marks.push(sv("circle", { class: `ex-weight${none[j] ? " ex-none" : ""}`, cx: X(value), cy: base - 9 - 6 * (j % 6), r: 4 }));
      });
      const middle = median(found);
      marks.push(sv("path", { class: "ex-median", d: `M${X(middle)} ${base - 1} l-6 9 h12 z` }));
      return {
        height,
        marks,
        says: [
          "Steps and posterior widths, relative to the right ones",
          `One dot a weight, on a logarithmic axis on which 1 is right. The median step is ${factor(middle)} of the right one; they run from ${factor(Math.min(...found))} to ${factor(Math.max(...found))}.`,
        ],
      };
    });

    function restore(given) {
      const all = { ...start, ...given };
      a.set(Number(all.a) || start.a);
      steps.set(Number(all.steps) || start.steps);
      order.set(all.order);
      run.set(all.run);
      render();
    }

    const percent = (share) => (share < 0.0005 ? (share > 0 ? "< 0.1%" : "0%") : `${show(100 * share, 3)}%`);

    function render() {
      a.refresh();
      steps.refresh();
      const [k, t] = [near(data.signals, a.value), near(data.steps, steps.value)];
      const truth = a.value ** 2;
      const [average, none, rank] = data.table[order.value][k][t];
      const ranked = (r) => (r == null ? "none" : r.toFixed(2));
      mean.set(`${show(average)}\u00a0s²`, `truth: ${show(truth)}\u00a0s²`);
      ratio.set(show(average / truth, 2), "1 is right");
      zeros.set(percent(none), "of the estimates");
      ranks.set(ranked(rank), rank == null ? "all alike" : "with the truth");
      const [b, C, sigma] = data.runs[Number(run.value)];
      const unit = data.ess * ((sigma * C) / b) ** 2;
      const middle = median(stretches(order.value, k, t, Number(run.value), data));
      const much = average / truth;
      const judged = much > 1.1 ? `${show(much, 2)} times the truth` : "the truth, or nearly";
      const step = middle > 0.9 && middle < 1.1 ? "about as far as it should" : middle < 1 ? `${factor(middle)} as far as it should` : `${show(middle, 2)} times as far as it should`;
      const wide = middle > 0.9 && middle < 1.1 ? "about right" : middle < 1 ? `${factor(Math.sqrt(middle))} as wide as it should be` : `${show(Math.sqrt(middle), 2)} times as wide as it should be`;
      says.set(
        `At a signal of ${a.value} of the noise, averaged over ${show(data.steps[t], 6)} ${data.steps[t] === 1 ? "step" : "steps"}, ${ORDERS[order.value][1]} returns ${show(average)}\u00a0s² in the mean: ${judged}. ` +
          `${percent(none)} of the estimates are zero. In this run that is a curvature of ${show(unit * average)} where ${show(unit * truth)} is right, ` +
          `so the median weight steps ${step}, and its posterior is ${wide}.`,
      );
      rows.set(["steps", "mean over truth", "exactly zero", "rank correlation"], data.steps.map((n, i) => {
        const [m, z, r] = data.table[order.value][k][i];
        return [`${show(n, 6)}${i === t ? " (now)" : ""}`, show(m / truth, 2), percent(z), ranked(r)];
      }));
      scatter.draw();
      strip.draw();
    }

    root.replaceChildren(
      el("div", { class: "ex-grid-wide" },
        el("div", { class: "ex-controls" }, a.root, steps.root, order.root, run.root,
          el("div", { class: "ex-readings" }, mean.root, ratio.root, zeros.root, ranks.root)),
        el("div", { class: "ex-main" }, el("div", { class: "ex-picture" }, scatter.root), el("div", { class: "ex-picture" }, strip.root)),
      ),
      says.root,
      rows.root,
      el("p", { class: "ex-fine" },
        `A block of ${show(data.weights, 6)} weights with different signals, whose root mean square is a; ${data.u.length} of them are drawn, orange where the estimate is zero. ` +
          `Means and zeros of the first two orders are exact; the rest is simulated with NumPy's generator at seed ${data.seed}. ` +
          "Steps and widths are for ", symbol("N", "ess"), ` = ${show(data.ess, 6)} and `, symbol("δ", "v"), ` = ${data.damping}.`),
    );
    restore(address.read());
    address.follow(restore);
  }

  // --------------------------------------------------------------- start

  window.explorers = { epsilonRdp, epsilonPrv, estimates, stretches, show };

  const begin = () => {
    const accounting = document.getElementById("explore-accounting");
    const curvature = document.getElementById("explore-curvature");
    if (accounting) exploreAccounting(accounting, window.exploreAccounting);
    if (curvature) exploreCurvature(curvature, window.exploreCurvature);
    // Settings that the text proposes.
    for (const button of document.querySelectorAll("button[data-explore]"))
      button.addEventListener("click", () => {
        location.hash = button.dataset.explore;
        document.querySelector(".explorer").scrollIntoView();
      });
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
