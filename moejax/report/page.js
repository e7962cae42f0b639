"use strict";
// Draws the page from the data that Python embedded. Every string becomes a text node or goes through `safe`.
const given = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const COLOURS = ["#2b78d4", "#d9822b", "#12908f", "#8656c4", "#c2452d", "#468f35", "#a8812f", "#c0458f"];
const touch = matchMedia("(pointer: coarse)").matches;
const dark = matchMedia("(prefers-color-scheme: dark)");
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const safe = (text) => echarts.format.encodeHTML(String(text));

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}
function table(head, rows) {
  const made = (tag, value, place) => value instanceof Element && value.matches("td") ? value
    : el(tag, { class: head[place].number ? "num" : null }, value);
  const cell = (tag) => (value, place) => {
    const node = made(tag, value, place);
    if (tag === "td" && (place || head[0].number)) node.dataset.name = head[place].name; // what a narrow screen shows before it
    return node;
  };
  return el("div", { class: head.length > 4 ? "wide many" : "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((one, place) => cell("th")(one.name, place)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td")))))));
}
const names = (...all) => all.map((name) => ({ name: name.replace(/#$/, ""), number: name.endsWith("#") }));
function section(title, caption, ...children) {
  main.append(el("section", {}, el("h2", {}, title), el("p", { class: "caption" }, caption), ...children));
}

// Numbers as people read them.
const round = (value, digits = 4) => Number.isFinite(value)
  ? Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 12 }) : "not finite";
const small = (value) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : round(value);
function scaled(value, units, step) {
  let place = 0;
  while (place < units.length - 1 && Math.abs(value) >= step ** (place + 1) * 0.9995) place += 1;
  return `${round(value / step ** place, 3)} ${units[place]}`.trim();
}
const bytes = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const many = (value) => scaled(value, ["", "thousand", "million", "billion", "trillion"], 1000);
const seconds = (value) => value < 1 ? `${round(value * 1e3, 3)} ms` : value < 120 ? `${round(value, 3)} s`
  : value < 7200 ? `${round(value / 60, 3)} min` : `${round(value / 3600, 3)} h`;
const percent = (share) => share > 0 && share < 0.001 ? "under 0.1 %" : `${round(share * 100, 3)} %`;
const exponent = (value) => value === 0 ? "0" : value.toExponential(2).replace(/\.?0+e/, "e"); // one form for all of an axis

function numbers(text, kind) {
  const raw = atob(text), data = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) data[i] = raw.charCodeAt(i);
  return new kind(data.buffer);
}

// Runs: columns become typed arrays; `at(run, name, i)` gives the place of a value on the axis that is shown.
function unpack(data) {
  return data.runs.map((run, place) => {
    const columns = Object.fromEntries(Object.entries(run.columns).map(([name, one]) =>
      [name, { steps: numbers(one.steps, Float64Array), values: numbers(one.values, Float64Array) }]));
    const experts = run.experts && { ...run.experts, values: numbers(run.experts.values, Uint16Array) };
    return { ...run, columns, experts, colour: COLOURS[place % COLOURS.length] };
  });
}
let runs = unpack(given);
const view = { axis: "steps", smooth: 0, from: 0, to: 100 };

// The time of a step: hours since the run's first line, even between two lines.
function hours(run, step) {
  const clock = run.columns.time;
  if (!clock) return NaN;
  let low = 0, high = clock.steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (clock.steps[middle] < step) low = middle + 1; else high = middle;
  }
  const before = Math.max(low - 1, 0), between = clock.steps[low] - clock.steps[before];
  const part = between ? Math.min((step - clock.steps[before]) / between, 1) : 1;
  return (clock.values[before] + part * (clock.values[low] - clock.values[before]) - clock.values[0]) / 3600;
}
const tokens = (run) => (run.config["train.batch_sequences"] ?? NaN) * (run.config["data.sequence_length"] ?? NaN);
const AXES = {
  steps: { name: "step", of: (_, step) => step },
  tokens: { name: "tokens", of: (run, step) => step * tokens(run) },
  hours: { name: "hours since the first report", of: hours },
};
const place = (run, step) => AXES[view.axis].of(run, step);

// Exponential moving average whose first values are not pulled towards zero; what is not a number is passed over.
function smoothed(values, weight) {
  if (!weight) return values;
  const out = new Float64Array(values.length);
  let mean = 0, count = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (Number.isFinite(values[i])) {
      mean = weight * mean + (1 - weight) * values[i];
      count = weight * count + (1 - weight);
    }
    out[i] = Number.isFinite(values[i]) ? mean / count : NaN;
  }
  return out;
}

const shownCharts = [];
function points(run, name, weight) {
  const column = run.columns[name];
  const values = smoothed(column.values, weight), flat = new Float64Array(2 * values.length);
  for (let i = 0; i < values.length; i += 1) {
    flat[2 * i] = place(run, column.steps[i]);
    flat[2 * i + 1] = values[i];
  }
  return flat;
}
function line(run, name, label, more = {}) {
  return { name: `${label}${runs.length > 1 ? `, ${run.name}` : ""}`, type: "line", data: points(run, name, more.weight ?? 0),
    dimensions: ["x", label], showSymbol: run.columns[name].steps.length < 2, symbolSize: 5, sampling: "lttb", animation: false,
    connectNulls: false, lineStyle: { width: 1.6, ...more.lineStyle }, itemStyle: { color: more.colour ?? run.colour },
    emphasis: { disabled: true }, silent: more.silent, tooltip: more.tooltip };
}
// What stands below the smoothed line, faint.
const raw = (run, name, label) => line(run, name, label,
  { lineStyle: { width: 1, opacity: 0.25 }, silent: true, tooltip: { show: false } });

function extent() {
  let high = 0;
  for (const run of runs) for (const { steps } of Object.values(run.columns)) {
    if (steps.length) high = Math.max(high, place(run, steps[steps.length - 1]) || 0);
  }
  return high || 1;
}
function marks() {
  const data = [];
  for (const run of runs) {
    // Beside other runs a mark that is no warning has its run's colour.
    const own = runs.length > 1 ? run.colour : style("accent");
    const wanted = { skipped: style("bad"), diverged: style("bad"), spike: style("bad"), rolled_back: style("bad"), stopped: runs.length > 1 ? own : style("soft"), planning_again: own };
    for (const one of run.events) if (wanted[one.event]) data.push({ xAxis: place(run, one.step), lineStyle: { color: wanted[one.event] } });
    for (const one of run.starts.slice(1)) data.push({ xAxis: place(run, one.step), lineStyle: { color: own } });
  }
  return { silent: true, symbol: "none", label: { show: false }, lineStyle: { type: "dashed", width: 1 }, data: data.slice(-200) };
}
function base(unit, format, log) {
  const soft = style("soft"), rule = style("line"), axis = { axisLine: { lineStyle: { color: rule } }, axisLabel: { color: soft }, splitLine: { lineStyle: { color: rule, opacity: 0.6 } } };
  return {
    animation: false, backgroundColor: "transparent", textStyle: { fontFamily: "system-ui, sans-serif", color: style("ink") },
    grid: { left: 8, right: 14, top: 26, bottom: 4, containLabel: true },
    tooltip: { trigger: "axis", confine: true, axisPointer: { type: "line", snap: false }, backgroundColor: style("card"), borderColor: rule,
      textStyle: { color: style("ink"), fontSize: 12 }, formatter: (all) => tip(all, format) },
    xAxis: { type: "value", min: 0, max: extent(), ...axis, splitLine: { show: false }, axisLabel: { color: soft, hideOverlap: true,
      formatter: (value) => view.axis === "hours" ? round(value, 3) : scaled(value, ["", "k", "M", "G", "T"], 1000) } },
    yAxis: { type: log ? "log" : "value", scale: true, name: unit, nameTextStyle: { color: soft, align: "left" }, ...axis,
      axisLabel: { color: soft, formatter: (value) => format(value) } },
    dataZoom: [{ type: "inside", start: view.from, end: view.to, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false,
      moveOnMouseMove: "shift", preventDefaultMouseMove: false, filterMode: "filter" }],
    toolbox: { show: true, itemSize: 0, feature: { dataZoom: { yAxisIndex: "none", brushStyle: { color: style("accent"), opacity: 0.15 } } } },
  };
}
function tip(all, format) {
  const shown = all.filter((one) => Number.isFinite(one.value?.[1]));
  if (!shown.length) return "";
  const head = `${AXES[view.axis].name} ${round(shown[0].value[0], 6)}`;
  return [safe(head), ...shown.map((one) => `${one.marker} ${safe(one.seriesName)}: <b>${safe(format(one.value[1]))}</b>`)].join("<br>");
}

// One chart; it is made when it comes into view, when the page has time, or before it is printed, and knows how to draw itself again.
const coming = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach(({ target }) => {
  coming.unobserve(target);
  target.chart.open();
}), { rootMargin: "300px" });
class Chart {
  constructor(height, option, { zooms = true, label = "" } = {}) {
    this.option = option;
    this.zooms = zooms;
    this.node = el("div", { class: `chart ${height}`, role: "img", "aria-label": label });
    this.node.chart = this;
    shownCharts.push(this);
    coming.observe(this.node);
  }
  open() {
    if (this.made || !this.node.isConnected) return;
    coming.unobserve(this.node);
    this.made = echarts.init(this.node, null, { renderer: "canvas" });
    this.draw();
    if (!this.zooms) return;
    this.made.on("datazoom", (event) => zoomed(event.batch?.[0] ?? event));
    this.made.getZr().on("dblclick", () => zoomTo(0, 100));
    if (!touch) this.made.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    this.made.group = "steps";
    echarts.connect("steps");
  }
  draw() {
    if (this.made) this.made.setOption(this.option(), { replaceMerge: ["series", "dataZoom"] });
    if (this.made && this.zooms && !touch) {
      this.made.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    }
  }
}
// Whoever captures the whole page, or prints it, never scrolls.
const openAll = () => shownCharts.forEach((one) => one.open());
function openLater() {
  const next = shownCharts.find((one) => !one.made && one.node.isConnected);
  if (!next) return;
  next.open();
  setTimeout(openLater, 0);
}
addEventListener("beforeprint", openAll);
function zoomed(event) {
  const full = extent();
  view.from = event.start ?? (100 * event.startValue) / full;
  view.to = event.end ?? (100 * event.endValue) / full;
  reset.hidden = view.from <= 0 && view.to >= 100;
}
function zoomTo(start, end) {
  view.from = start;
  view.to = end;
  reset.hidden = start <= 0 && end >= 100;
  for (const one of shownCharts) if (one.zooms && one.made) one.made.dispatchAction({ type: "dataZoom", start, end }, { silent: true });
}
const redraw = () => shownCharts.forEach((one) => one.draw());
new ResizeObserver(() => shownCharts.forEach((one) => one.made?.resize())).observe(document.body);
dark.addEventListener("change", redraw);

function headline() {
  const [run] = runs, last = run.columns.loss?.steps.at(-1), wanted = run.config["train.num_steps"];
  const title = runs.length === 1 ? run.name : `${runs.length} runs: ${runs.map((one) => one.name).join(", ")}`;
  document.title = `${title} - moejax report`;
  const far = runs.length > 1 ? "" : last == null ? "No step has been reported yet." :
    `Step ${last.toLocaleString("en")}${wanted ? ` of ${wanted.toLocaleString("en")}` : ""}.`;
  const damaged = runs.flatMap((one) => one.damaged.map((what) => `${one.name}: ${what}`));
  const unread = damaged.length ? el("details", {}, el("summary", { class: "warning" }, `${damaged.length} records could not be read`),
    el("ul", {}, damaged.slice(0, 100).map((what) => el("li", {}, what)))) : "";
  const forced = runs.filter((one) => (one.config["moe.router.forced"] ?? "none") !== "none").map((one) => one.name);
  const benchmark = forced.length ? el("p", { class: "warning" }, `Forced routing (${forced.join(", ")}): experts do not follow scores. ` +
    "Speed and loads are those of a benchmark.") : "";
  main.append(el("p", { class: "eyebrow" }, "moejax report"), el("h1", {}, title), benchmark,
    el("p", { class: "soft" }, far, el("span", { id: "news" })), runs.length === 1 ? tiles(run) : null, unread, tools());
  if (runs.length > 1) main.append(el("ul", { class: "key" }, runs.map((one) => el("li", {},
    el("i", { style: `background:${one.colour}` }), one.name))));
}
// How a run stands: by its steps, its last words, and whether it is being followed.
function state(run) {
  const wanted = run.config["train.num_steps"], last = run.columns.loss?.steps.at(-1);
  if (wanted && last >= wanted) return "finished";
  const said = run.events.findLast((one) => ["start", "first_step", "stopped", "diverged"].includes(one.event))?.event;
  if (said === "stopped" || said === "diverged") return said;
  const newest = run.goodput?.processes.map((one) => one.starts.at(-1)?.[2]) ?? [];
  if (newest.includes("hang")) return "hung";
  if (newest.includes("error")) return "failed";
  return given.live ? "running" : "not finished";
}
function tiles(run) {
  const last = (name) => run.columns[name]?.values.at(-1), start = run.starts.at(-1), known = run.goodput;
  const step = run.columns.loss?.steps.at(-1), wanted = run.config["train.num_steps"];
  const tile = (value, ...lines) => el("div", {}, el("strong", {}, value), lines.filter(Boolean).map((one) => el("span", {}, one)));
  const when = (value, make) => value == null || Number.isNaN(value) ? null : make(value);
  const sizes = Object.fromEntries(["stage", "replica", "fsdp", "expert", "tensor"].map((axis) => [axis, run.config[`mesh.${axis}`] ?? 1]));
  const named = Object.values(sizes).reduce((all, size) => all * size, 1);
  if (run.config["mesh.replica"] == null && start?.devices) sizes.replica = start.devices / named; // what the other axes leave
  const mesh = Object.entries(sizes).filter(([, size]) => size > 1);
  return el("div", { class: "tiles" }, tile(state(run), step == null ? "no step reported" : `step ${step.toLocaleString("en")}${wanted ? ` of ${wanted.toLocaleString("en")}` : ""}`),
    when(last("loss"), (v) => tile(round(v), "loss, last report")),
    when(last("held_out_bits_per_byte"), (v) => tile(round(v), "bits per byte, held out", when(last("held_out_nats_per_token"), (nats) => `${round(nats)} nats per token`))),
    when(median(run, "tokens_per_second"), (v) => tile(scaled(v, ["", "k", "M", "G"], 1000), "tokens/s, median", when(median(run, "share_of_peak"), (share) => `${percent(share)} of the measured peak`))),
    when(start?.parameters, (v) => tile(many(v), "parameters")),
    when(start?.devices, (v) => tile(mesh.map(([axis, size]) => `${axis} ${size}`).join(", ") || "one device", `mesh of ${v} x ${start.device ?? "devices"}`)),
    when(known, () => tile(seconds(Object.values(known.seconds).reduce((sum, s) => sum + s, 0)), "wall time", `${known.number + 1} ${known.number ? "starts" : "start"}`)),
    when(known?.goodput, (v) => tile(percent(v), "goodput")));
}
const reset = el("button", { onclick: () => zoomTo(0, 100), hidden: "" }, "whole run");
function tools() {
  const axes = Object.keys(AXES).filter((name) => name !== "tokens" || runs.every((run) => tokens(run) > 0));
  const choose = el("select", { onchange: (event) => { view.axis = event.target.value; redraw(); } },
    axes.map((name) => el("option", { value: name }, AXES[name].name)));
  const slide = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth,
    oninput: (event) => { view.smooth = Number(event.target.value); redraw(); } });
  const hint = touch ? "Pinch a chart to zoom." : "Drag over a chart to zoom all of them; double-click for the whole run.";
  return el("div", { class: "tools" }, el("label", {}, "over", choose), el("label", {}, "smoothing", slide), reset, el("span", { class: "soft" }, hint));
}

const TRAINING = [
  { name: "loss", title: "Loss", unit: "nats per target", also: [["held_out_nats_per_token", "held out"], ["ahead_loss", "tokens ahead"]] },
  { name: "held_out_bits_per_byte", title: "Held-out text", unit: "bits per byte" },
  { name: "learning_rate", title: "Learning rate", format: exponent, exact: true },
  { name: "gradient_norm", title: "Gradient norm before clipping", log: true, format: small },
];
const SPEED = [
  { name: "tokens_per_second", title: "Tokens a second", format: (v) => scaled(v, ["", "k", "M", "G"], 1000) },
  { name: "share_of_peak", title: "Share of the measured peak", format: percent },
  { name: "predicted_ratio", title: "Step time, measured over predicted", format: (v) => `${round(v, 3)} x` },
];
const ROUTING = [
  { name: "balance", title: "Load-balance loss (1 is even)" },
  { name: "router_entropy", title: "Router entropy (1: it tells no experts apart)" },
  { name: "routing_agreement", title: "Recorded choices that the router makes too", format: percent },
  { name: "busiest_expert", title: "Busiest expert over the mean, worst layer", format: (v) => `${round(v, 3)} x` },
  { name: "rounds", title: "Overflow rounds in a step", exact: true, none: "No bucket overflowed.", say: (run) => roundCost(run.round_cost) },
  { name: "dropped", title: "Assignments dropped in a step", exact: true, none: "None were dropped." },
];
// Runs whose values are the same as far as both go take turns in one dashed line.
function turns(run, column) {
  const own = run.columns[column];
  const alike = (name, one) => one.columns[column]?.[name].every((value, i) => i >= own[name].length || value === own[name][i]);
  const same = runs.filter((one) => alike("steps", one) && alike("values", one)), turn = same.indexOf(run);
  return same.length > 1 && turn ? { type: [8, 8 * (same.length - 1)], dashOffset: -8 * turn } : {};
}
// Which line is which, where a chart has several of one run.
function legend(labels) {
  if (labels.length < 2) return null;
  const stroke = (place) => runs.length === 1 ? COLOURS[place]
    : place ? `repeating-linear-gradient(90deg, ${style("soft")} 0 3px, transparent 3px 6px)` : style("soft");
  return el("ul", { class: "key line" }, labels.map(([place, label]) => el("li", {}, el("i", { style: `background:${stroke(place)}` }), label)));
}
function roundCost(cost) {
  return cost && `A round takes about ${seconds(cost.seconds)} (${seconds(cost.low)} to ${seconds(cost.high)}, by steps with more and fewer), all of them ${percent(cost.share)} of the steps' time. A larger moe.headroom makes fewer.`;
}
function curve({ name, title, unit = "", also = [], format = round, log = false, exact = false, none = null, say = null }) {
  const all = [[name, title.split(",")[0].toLowerCase()], ...also];
  const known = (run) => all.filter(([column]) => run.columns[column]?.steps.length);
  if (!runs.some((run) => known(run).length)) return null;
  if (none && runs.every((run) => run.columns[name]?.values.every((value) => value === 0) ?? true)) {
    return el("div", {}, el("h3", {}, title), el("p", { class: "soft" }, none));
  }
  const option = () => {
    const weight = exact ? 0 : view.smooth, series = [];
    for (const run of runs) known(run).forEach(([column, label]) => {
      const which = all.findIndex(([one]) => one === column);
      const colour = runs.length > 1 ? run.colour : COLOURS[which];
      const long = run.columns[column].steps.length > 30;
      const lineStyle = runs.length === 1 ? {} : which ? { type: "dashed" } : exact ? turns(run, column) : {};
      if (weight && long) series.push({ ...raw(run, column, label), itemStyle: { color: colour } });
      series.push(line(run, column, label, { weight: long ? weight : 0, colour, lineStyle }));
    });
    if (series.length) series[0].markLine = marks();
    return { ...base(unit, format, log), series };
  };
  const labels = all.map(([column, label], place) => [place, label, column]).filter(([, , column]) => runs.some((run) => run.columns[column]?.steps.length));
  const said = say && runs.length === 1 ? say(runs[0]) : null;
  return el("div", {}, el("h3", {}, title), said && el("p", { class: "soft" }, said), legend(labels), new Chart("", option, { label: title }).node);
}
function curves(title, caption, charts) {
  const made = charts.map(curve).filter(Boolean);
  if (made.length) section(title, caption, el("div", { class: "grid" }, made));
}

function median(run, name) {
  const sorted = run.columns[name]?.values.filter(Number.isFinite).sort();
  return sorted?.length ? sorted[sorted.length >> 1] : undefined;
}
function finals() {
  const last = (run, name) => run.columns[name]?.values.at(-1);
  const best = (run, name) => run.columns[name] && run.columns[name].values.reduce((least, v) => v < least ? v : least, Infinity);
  const say = (value, format) => value == null ? "-" : format(value);
  section("Where they stand", "The last value recorded; the median for speed.", table(
    names("run", "step#", "loss#", "held out, nats per token#", "least#", "bits per byte#", "tokens a second#", "share of peak#", "goodput#", "starts#", "skipped#"),
    runs.map((run) => [el("td", {}, el("i", { class: "swatch", style: `background:${run.colour}` }), run.name),
      say(run.columns.loss?.steps.at(-1), (v) => v.toLocaleString("en")), say(last(run, "loss"), round),
      say(last(run, "held_out_nats_per_token"), round), say(best(run, "held_out_nats_per_token"), round),
      say(last(run, "held_out_bits_per_byte"), round), say(median(run, "tokens_per_second"), (v) => round(v, 3)),
      say(median(run, "share_of_peak"), percent), say(run.goodput?.goodput, percent), String(run.starts.length || 1), say(last(run, "skipped"), round)])));
}

// Experts: layers by experts at one step, and one layer's experts over the run.
function experts(run) {
  const known = run.experts;
  if (!known) return;
  const state = { shot: known.steps.length - 1, layer: 0 };
  const { layers: L, experts: E } = known, load = (shot, layer, expert) => known.values[(shot * L + layer) * E + expert] / 1000;
  const colours = () => ({ type: "piecewise", show: true, orient: "horizontal", left: "center", top: 0, itemWidth: 14, itemGap: 6, textStyle: { color: style("soft") },
    pieces: [{ max: 0.25, color: "#2166ac", label: "under 0.25" }, { gt: 0.25, max: 0.5, color: "#67a9cf", label: "0.5" },
      { gt: 0.5, max: 0.8, color: "#c3dbe8", label: "0.8" }, { gt: 0.8, max: 1.25, color: dark.matches ? "#3a4048" : "#efefec", label: "1.25" },
      { gt: 1.25, max: 2, color: "#f6c6a8", label: "2" }, { gt: 2, max: 4, color: "#e0794f", label: "4" }, { gt: 4, color: "#a3182c", label: "over 4" }] });
  const called = (nameGap) => ({ nameLocation: "middle", nameGap, nameTextStyle: { color: style("soft") } });
  const grid = (rows, columns, rowName, columnName, data, about) => ({
    animation: false, textStyle: { fontFamily: "system-ui, sans-serif" }, grid: { left: 26, right: 14, top: 44, bottom: 24, containLabel: true },
    tooltip: { confine: true, backgroundColor: style("card"), borderColor: style("line"), textStyle: { color: style("ink"), fontSize: 12 },
      formatter: ({ value }) => safe(about(value)) },
    xAxis: { type: "category", data: columns, name: columnName, ...called(26), axisLabel: { color: style("soft"), hideOverlap: true }, splitArea: { show: false } },
    yAxis: { type: "category", data: rows, name: rowName, ...called(34), inverse: true, axisLabel: { color: style("soft"), hideOverlap: true } },
    visualMap: colours(), series: [{ name: rowName + columnName, type: "heatmap", data, progressive: 20000, emphasis: { itemStyle: { borderColor: style("ink"), borderWidth: 1 } } }] });
  const count = (n) => Array.from({ length: n }, (_, i) => i);
  const now = new Chart(E > 32 ? "tall" : "", () => {
    const data = [];
    for (let layer = 0; layer < L; layer += 1) for (let e = 0; e < E; e += 1) data.push([layer, e, load(state.shot, layer, e)]);
    return grid(count(E), count(L), "expert", "layer", data, ([layer, e, value]) => `layer ${layer}, expert ${e}: ${round(value, 3)} of the mean`);
  }, { zooms: false, label: "Load of each expert, by layer" });
  const over = new Chart(E > 32 ? "tall" : "", () => {
    const data = [];
    known.steps.forEach((_, shot) => { for (let e = 0; e < E; e += 1) data.push([shot, e, load(shot, state.layer, e)]); });
    return grid(count(E), known.steps.map((step) => step.toLocaleString("en")), "expert", "step", data,
      ([shot, e, value]) => `step ${known.steps[shot].toLocaleString("en")}, layer ${state.layer}, expert ${e}: ${round(value, 3)} of the mean`);
  }, { zooms: false, label: "Load of each expert of one layer over the run" });
  const said = el("span", {}, known.steps[state.shot].toLocaleString("en"));
  const slide = el("input", { type: "range", min: 0, max: known.steps.length - 1, value: state.shot, oninput: (event) => {
    state.shot = Number(event.target.value);
    said.textContent = known.steps[state.shot].toLocaleString("en");
    now.draw();
  } });
  const choose = el("select", { onchange: (event) => { state.layer = Number(event.target.value); over.draw(); } },
    count(L).map((layer) => el("option", { value: layer }, `layer ${layer}`)));
  section(`Experts' load${runs.length > 1 ? `: ${run.name}` : ""}`,
    "What each expert was given, over the mean of its layer. Layers count the expert layers alone. What helps: docs/guide/run.md, Uneven experts.",
    el("div", { class: "grid" },
      el("div", {}, el("h3", {}, "Experts by layers"), el("label", { class: "soft" }, "at step ", said, " ", slide), now.node),
      el("div", {}, el("h3", {}, "Experts over the run"), el("label", { class: "soft" }, "of ", choose), over.node)));
}

const words = (name) => name.replaceAll("_", " ");
function plan(run) {
  const predicted = run.plan?.predicted;
  if (!predicted?.terms) return;
  const rates = run.columns.tokens_per_second?.values.filter(Number.isFinite).sort(), rate = rates?.[rates.length >> 1];
  const measured = rate ? tokens(run) / rate : null;
  const terms = Object.entries(predicted.terms), shown = terms.slice(0, 12), rest = terms.slice(12).reduce((sum, [, s]) => sum + s, 0);
  if (rest) shown.push([`${terms.length - 12} smaller parts`, rest]);
  const bars = ["predicted", ...(measured ? ["measured"] : [])];
  const chart = new Chart("low", () => ({ animation: false, grid: { left: 8, right: 14, top: 6, bottom: 4, containLabel: true },
    tooltip: { confine: true, backgroundColor: style("card"), borderColor: style("line"), textStyle: { color: style("ink"), fontSize: 12 },
      formatter: ({ seriesName, value }) => safe(`${seriesName}: ${seconds(value)}`) },
    xAxis: { type: "value", axisLabel: { color: style("soft"), formatter: seconds }, splitLine: { lineStyle: { color: style("line") } } },
    yAxis: { type: "category", data: bars, inverse: true, axisLabel: { color: style("ink") } },
    series: [...shown.map(([name, value], i) => ({ name: words(name), type: "bar", stack: "one", data: [value, ...(measured ? [0] : [])],
      itemStyle: { color: COLOURS[i % COLOURS.length], opacity: name.startsWith("waiting") ? 0.55 : 1 } })),
    ...(measured ? [{ name: "a step, measured", type: "bar", stack: "one", data: [0, measured], itemStyle: { color: style("soft") } }] : [])] }),
  { zooms: false, label: "Predicted and measured time of a step" });
  const page = run.plan.page && el("details", { ontoggle: (event) => {
    const box = event.target;
    if (box.open && !box.querySelector("iframe")) box.append(el("iframe", { sandbox: "allow-scripts", srcdoc: run.plan.page, title: "the planner's page" }));
  } }, el("summary", {}, "The planner's page, with its timeline"));
  section(`The plan${runs.length > 1 ? `: ${run.name}` : ""}`, `Predicted on ${run.plan.topology}: ${seconds(predicted.seconds)} a step` +
    `${measured ? `; measured ${seconds(measured)} (the median report), ${round(measured / predicted.seconds, 3)} x` : ""}.`, chart.node,
    el("details", {}, el("summary", {}, "Parts of the predicted step"), table(names("part", "time#", "share#"),
      terms.map(([name, value]) => [words(name), seconds(value), percent(value / predicted.seconds)]))), page);
}

function profile(run) {
  const known = run.profile;
  if (!known) return;
  const open = el("p", { class: "soft" }, "Each operation over time: ", el("code", {}, `xprof --logdir ${known.directory}`));
  const title = `Where a step's time goes${runs.length > 1 ? `: ${run.name}` : ""}`;
  if (!known.rows) return section(title, "Some steps were profiled; the trace lacks its program, or is too large to sum here.", open);
  const rows = Object.entries(known.rows), total = rows.reduce((sum, [, row]) => sum + row.forward + row.backward, 0);
  section(title, `From the profile of ${known.steps} steps on ${known.devices} devices: operations of one device and step, by stage of the code. ` +
    "The last column is the part of both that collectives take, waiting for other devices included. What overlaps counts twice.",
    table(names("stage", "share#", "forward#", "backward#", "collectives#"), rows.map(([name, row]) =>
      [words(name), percent((row.forward + row.backward) / total), seconds(row.forward), seconds(row.backward), seconds(row.sends)])), open);
}

function traffic(run) {
  const sent = run.starts.at(-1)?.traffic;
  if (!Array.isArray(sent) || !sent.length) return;
  section(`What travels${runs.length > 1 ? `: ${run.name}` : ""}`,
    "Counted in the traced step: what collectives of a step take on one device, by purpose and mesh axes.",
    table(names("purpose", "collective", "over", "crosses", "calls a step#", "bytes a step#"), sent.map((one) =>
      [words(one.class || "small sums"), words(one.kind), one.axes.join(", "), one.between_nodes ? "nodes" : "-", one.calls.toLocaleString("en"), bytes(one.bytes)])));
}

const SAID = { first_step: "first step", save: "checkpoint started", saved: "checkpoint finished", planning_again: "planning again", final_eval: "final evaluation" };
function events(run) {
  if (!run.events.length) return;
  const kinds = [...new Set(run.events.map((one) => one.event))];
  const chart = new Chart("low", () => ({ ...base("", String, false), grid: { left: 125, right: 14, top: 12, bottom: 24 }, yAxis: { type: "category", data: kinds.map((kind) => SAID[kind] ?? words(kind)),
      axisLabel: { color: style("soft") }, splitLine: { show: true, lineStyle: { color: style("line"), opacity: 0.5 } } },
    tooltip: { trigger: "item", confine: true, backgroundColor: style("card"), borderColor: style("line"), textStyle: { color: style("ink"), fontSize: 12 },
      formatter: ({ data }) => safe(`step ${data.step}: ${data.said || data.name}`) },
    series: [{ type: "scatter", symbolSize: 7, itemStyle: { color: run.colour, opacity: 0.8 }, data: run.events.map((one) => ({
      value: [place(run, one.step), kinds.indexOf(one.event)], name: SAID[one.event] ?? words(one.event), step: one.step, said: about(one) })) }] }), { label: "Events over the run" });
  chart.node.style.height = `${4 + 1.6 * kinds.length}rem`;
  const rows = run.events.slice(-200).reverse().map((one) => [new Date(one.time * 1000).toISOString().slice(0, 19).replace("T", " "),
    one.step.toLocaleString("en"), SAID[one.event] ?? words(one.event), about(one)]);
  section(`Events${runs.length > 1 ? `: ${run.name}` : ""}`, "Starts, checkpoints, skipped updates, notes and warnings." +
    (run.left_out ? ` ${run.left_out.toLocaleString("en")} older ones are left out.` : ""), chart.node,
    el("details", {}, el("summary", {}, `The newest ${rows.length}`), table(names("time (UTC)", "step#", "event", "about"), rows)));
}
function about(one) {
  if (one.text) return one.text;
  const rest = Object.entries(one).filter(([name, value]) => !["time", "event", "step", "traffic"].includes(name) && value !== null && typeof value !== "object");
  return rest.map(([name, value]) => `${words(name)} ${Number.isInteger(value) ? value.toLocaleString("en") : typeof value === "number" ? small(value) : value}`).join(", ");
}

function settings() {
  const said = (value) => value === undefined ? "-" : value === null ? "none" : Array.isArray(value) ? value.join(", ") : String(value);
  for (const run of runs) {
    if (run.changes.length) section(`Changed between starts${runs.length > 1 ? `: ${run.name}` : ""}`, "Settings, devices and versions that a resume found otherwise than the start before.",
      table(names("at step#", "what", "before", "after"), run.changes.map((one) => [one.step.toLocaleString("en"), one.name, said(one.before), said(one.after)])));
  }
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  if (!all.length) return;
  const differ = all.filter((name) => new Set(runs.map((run) => JSON.stringify(run.config[name]))).size > 1);
  const rows = (wanted) => wanted.map((name) => [name, ...runs.map((run) => said(run.config[name]))]);
  const head = names("setting", ...runs.map((run) => runs.length > 1 ? run.name : "value"));
  section("Config", runs.length > 1 ? `${differ.length} settings differ between the runs.` : "Every setting of the newest start, as it was resolved.",
    differ.length ? table(head, rows(differ)) : null, el("details", {}, el("summary", {}, `All ${all.length} settings`), table(head, rows(all))));
}

function build() {
  headline();
  if (runs.length > 1) finals();
  curves("Training", "Dashed lines mark resumes, stops and skipped updates.", TRAINING);
  curves("Speed", "Over the steps between two reports; evaluation is left out, saving is not.", SPEED);
  curves("Routing", "How evenly the router spreads the tokens.", ROUTING);
  runs.forEach(experts);
  runs.forEach(goodput);
  runs.forEach(plan);
  runs.forEach(profile);
  runs.forEach(traffic);
  runs.forEach(events);
  settings();
  setTimeout(openLater, 0);
}
// While a run goes on, its server is asked for news; what was chosen on the page stays.
async function follow() {
  let mark = given.mark;
  for (;;) {
    await new Promise((done) => setTimeout(done, 2000));
    const news = document.getElementById("news");
    try {
      const answer = await fetch(`data?${new URLSearchParams({ mark, token: new URLSearchParams(location.search).get("token") ?? "" })}`);
      if (answer.status === 204) { news.textContent = " Following the run."; continue; }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const data = await answer.json(), [x, y] = [scrollX, scrollY];
      mark = data.mark;
      runs = unpack(data);
      shownCharts.splice(0).forEach((one) => one.made?.dispose());
      main.replaceChildren();
      build();
      scrollTo(x, y);
    } catch (error) {
      news.textContent = ` No longer following the run: ${error.message}. The page is as it was then.`;
    }
  }
}
build();
if (given.live) follow();
window.moejax = { runs: () => runs, view, charts: shownCharts, zoomTo, ready: true };
