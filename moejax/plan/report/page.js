"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = document.getElementById("blank").namespaceURI;
const main = document.querySelector("main");
const [best, ...others] = data.plans;
const LANES = ["compute", ...data.cluster.links];

// Every string becomes a text node or an attribute, never markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const round = (value, digits = 3) => Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
function scaled(value, units, step) {
  let place = units.findIndex((_, p) => Math.abs(value) < step ** (p + 1) * 0.9995);
  if (place < 0) place = units.length - 1;
  return `${round(value / step ** place)} ${units[place]}`.trim();
}
const bytes = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const many = (value) => (value < 1e6 ? round(value) : scaled(value / 1e6, ["million", "billion", "trillion"], 1000));
const time = (seconds) => seconds === 0 ? "0 ms" : scaled(seconds * 1e6, ["\u00b5s", "ms", "s"], 1000);
const digits = best.seconds > 1 ? 1 : best.seconds > 0.01 ? 2 : 4;
const ms = (seconds) => (seconds * 1e3).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => (share > 0 && share < 0.001 ? "under 0.1 %" : `${round(share * 100, 2)} %`);
const times = (factor) => factor >= 1 ? `${round(factor)} \u00d7 better` : `${round(1 / factor)} \u00d7 worse`;

const WAITING = "waiting for ";
const WORDS = { stage_slots: "kept by stages", stage_sums: "sums of gradients in stages", step: "the rest of the step", counters: "counters and biases", loss: "loss and logits",
  "waiting for step": "waiting for small sums" };
const words = (name) => WORDS[name] ?? name.replaceAll("_", " ");
const sent = (name) => (name === "step" ? "small sums" : words(name));
const CLASSES = ["dispatch", "dispatch_backward", "combine", "combine_backward", "dense_gradient", "expert_gradient",
  "weights", "activations", "context", "routing"];
const link = (name) => `var(--${CLASSES.includes(name) ? name : "small"})`;
const compute = (name) => `var(--${["experts", "attention"].includes(name) ? name : "compute"})`;
const colour = (lane, name) => (lane === "compute" ? compute(name) : link(name));
const pale = (name) => !name.startsWith(WAITING) && compute(name) === "var(--compute)";
const termColour = (term) => (term.startsWith(WAITING) ? link(term.slice(WAITING.length)) : compute(term));
const swatch = (background, waits) => el("span", { class: `swatch ${waits ? "waits" : ""}`, style: `background-color:${background}` });

function section(title, caption, ...children) {
  main.append(el("section", {}, el("h2", {}, title), el("p", { class: "caption" }, caption), ...children));
}
function table(head, rows, foot) {
  const cell = (tag) => (value, place) => value instanceof Element && value.matches("td") ? value
    : el(tag, { class: place ? "num" : null }, value);
  const made = el("table", {}, el("thead", {}, el("tr", {}, head.map(cell("th")))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td"))))));
  if (foot) made.append(el("tfoot", {}, el("tr", {}, foot.map(cell("td")))));
  return made;
}
function stack(parts, whole) {
  return el("div", { class: "stack", "aria-hidden": "true" }, parts.map(([name, size, background, waits, pale]) => el("i", {
    class: `${waits ? "waits" : ""} ${pale ? "pale" : ""} ${size / whole < 0.09 ? "thin" : ""}`,
    title: `${name}: ${percent(size / whole)}`, style: `width:${(100 * size) / whole}%;background-color:${background}` }, name)));
}

function headline() {
  const { model, cluster, routing } = data;
  const title = `${many(model.parameters)} parameters on ${cluster.devices} \u00d7 ${cluster.device}`;
  document.title = `${title} - moejax plan`;
  const experts = model.experts ? `, ${model.experts} experts of hidden width ${model.expert_hidden}, ` +
    `${model.experts_per_token} for each token (${many(model.active)} parameters active)` : "";
  const rule = data.rule && data.plans.find((one) => one.name.split(" ").includes(data.rule));
  const runner = others.find((one) => /^\d/.test(one.name));
  const tile = (value, ...lines) => el("div", {}, el("strong", {}, value), lines.map((line) => el("span", {}, line)));
  const over = (other, name) => !other || other === best ? null
    : !other.fits ? tile("does not fit", name, `would need ${bytes(other.memory_bytes)} of a device`)
    : tile(`${(other.seconds / best.seconds).toFixed(2)} \u00d7`, `as fast as ${name}`, `which takes ${time(other.seconds)}`);
  main.append(el("p", { class: "eyebrow" }, "moejax plan"), el("h1", {}, title),
    el("p", { class: "soft" }, `${model.layers} layers of width ${model.width}${experts}. ${model.sequences} sequences of ` +
      `${model.sequence_length} tokens a step. Cluster ${cluster.name}: ${cluster.devices} devices on ${cluster.nodes} ` +
      `${cluster.nodes === 1 ? "node" : "nodes"}, joined by ${cluster.links.join(", then ")}. Routing ${routing.name}: the busiest expert gets ` +
      `${routing.skew.toFixed(2)} times the mean.`),
    el("div", { class: "tiles" }, tile(time(best.seconds), "a step, predicted"),
      tile(many(best.tokens_per_second), "tokens a second", `${percent(best.tokens_per_second * model.flops_per_token /
        cluster.devices / cluster.peak_flops_per_s)} of the fastest matrix product (MFU)`),
      tile(bytes(best.memory_bytes), `of ${bytes(cluster.memory_bytes)} a device`),
      over(rule, `the best rule of thumb, ${data.rule}`), over(runner, "the runner-up")),
    ...data.said.map((text) => el("p", { class: "soft" }, text)),
    ...(data.search.cut ? [el("p", { class: "bad" }, `Note: ${data.search.cut}`)] : []),
    el("p", { class: "soft" }, "To train with this plan, write it with ", el("code", {}, "--out plan.json"), " and give a run ",
      el("code", {}, "--config.plan=plan.json"), ". Its report then says how long a step took, and how long it was to take."),
    el("dl", { class: "plan" }, meaning().map(([name, said]) => [el("dt", {}, name), el("dd", {}, said)])));
  const compared = [[rule, data.rule], [runner, "the runner-up"]].filter(([one]) => one && one !== best && one.fits);
  main.append(el("div", { class: "pair" }, compared.map(([one, name]) => el("div", {},
    el("h3", {}, `Against ${name}: ${one.mesh}${one.route === "-" ? "" : `, ${one.route}`}`), against(one, 5)))));
}
function meaning() {
  const axes = {
    replica: (n) => `${n} copies of the model, each with its own part of the batch`,
    fsdp: (n) => `weights cut into ${n} parts, gathered when they are used`,
    expert: (n) => `experts spread over ${n} groups of devices; tokens travel to them`,
    tensor: (n) => `every matrix cut over ${n} devices, which work on it together`,
    stage: (n) => `layers cut into ${n} stages; micro-batches go from one to the next`,
  };
  const layouts = {
    "one device": "nothing is cut",
    sequence: "between blocks, each device of a tensor group holds a part of every sequence",
    replicated: "between blocks, each device of a tensor group holds whole sequences",
    "experts hidden": "each expert cut over the tensor group",
    "experts folded": "whole experts, dealt out over the tensor group",
    "experts whole": "every device of a tensor group holds its experts whole",
  };
  const rows = best.mesh.split(", ").map((part) => {
    const [axis, size] = part.split(" ");
    return [part, axes[axis]?.(size) ?? layouts[part] ?? ""];
  });
  rows.push(["route", best.route_text]);
  if (best.codecs !== "none") rows.push(["codecs", `compressed between nodes: ${words(best.codecs)}`]);
  rows.push(...Object.entries(best.rest_parts));
  return rows;
}
// The terms that differ most, or all of them, beside the winner's.
function against(one, most) {
  const names = [...new Set([...Object.keys(best.terms), ...Object.keys(one.terms)])];
  const all = names.map((name) => [name, best.terms[name] ?? 0, one.terms[name] ?? 0])
    .sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]));
  const telling = (row) => Math.abs(row[2] - row[1]) > 0.002 * best.seconds;
  const large = (row) => Math.max(row[1], row[2]) > 0.001 * best.seconds;
  const rows = all.filter(most ? telling : large).slice(0, most), small = all.filter((row) => !large(row));
  const sum = (place) => small.reduce((total, row) => total + row[place], 0);
  if (!most && small.length) rows.push([`${small.length} smaller parts`, sum(1), sum(2)]);
  const cells = ([name, mine, theirs]) => {
    const change = ms(theirs - mine), none = Number(change) === 0;
    const more = theirs > mine, kind = none ? "" : more ? "bad" : "good";
    return [words(name), ms(mine), ms(theirs), el("td", { class: `num ${kind}` }, none ? "-" : more ? `+${change}` : change)];
  };
  if (!rows.length) return el("p", { class: "soft" }, "No part of the step differs by 0.2 %.");
  return table(["ms of a step", "chosen", "there", "more"], rows.map(cells),
    cells(["the whole step", best.seconds, one.seconds]));
}

function terms() {
  const all = Object.entries(best.terms), shown = all.filter(([, s]) => s >= 0.005 * best.seconds);
  const rest = all.slice(shown.length), left = rest.reduce((sum, [, s]) => sum + s, 0);
  const rows = shown.map(([name, seconds]) => [words(name), seconds, termColour(name), name.startsWith(WAITING), pale(name)]);
  if (rest.length) rows.push([`${rest.length} smaller parts`, left, "var(--track)", false, true]);
  section("Where the step goes", "One step of one device, cut by what it is spent on. Grey is computing. Hatched colour is " +
    "waiting: the network works and nothing computes. Traffic that hides behind computing costs nothing here.",
    stack(rows, best.seconds), table(["part", "ms", "share"], rows.map(([name, seconds, background, waits]) =>
      [el("td", {}, swatch(background, waits), name), ms(seconds), percent(seconds / best.seconds)]),
      ["the step", ms(best.seconds), "100 %"]));
}

function traffic() {
  const largest = Math.max(...data.traffic.map((one) => one.seconds));
  section("What travels", "What one device sends in a step, by link and purpose. Bars compare how long each keeps its link busy.",
    data.cluster.links.map((name) => {
      const mine = data.traffic.filter((one) => one.link === name);
      if (!mine.length) return el("p", {}, `Nothing travels over ${name}.`);
      const sum = (key) => mine.reduce((total, one) => total + one[key], 0);
      return [el("h3", {}, `${name}: busy ${percent(sum("seconds") / best.seconds)} of the step`),
        table(["purpose", "sent", "ms busy", ""], mine.map((one) => [
          el("td", {}, swatch(link(one.class)), sent(one.class)), bytes(one.bytes), ms(one.seconds),
          el("td", { class: "bar" }, el("i", { style: `width:${(100 * one.seconds) / largest}%;background:${link(one.class)}` }))]),
          ["together", bytes(sum("bytes")), ms(sum("seconds")), ""])];
    }));
}

function memory() {
  const { arguments: kept, temporary } = data.memory, whole = Math.max(data.cluster.memory_bytes, data.memory.bytes);
  const share = (size) => percent(size / data.cluster.memory_bytes);
  const shades = (base) => (place) => `color-mix(in oklab, var(--${base}), var(--paper) ${Math.min(70, place * 14)}%)`;
  const rows = (parts, base, labelOf) => Object.entries(parts).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1])
    .map(([name, size], place) => [labelOf(name), size, shades(base)(place), false, place > 1]);
  const [stays, comes] = [rows(kept, "weights", words), rows(temporary, "combine", words)];
  const listed = (title, all) => el("div", {}, el("h3", {}, title), table(["kind", "size", "of the device"],
    all.map(([name, size, background]) => [el("td", {}, swatch(background), name), bytes(size), share(size)]),
    ["together", ...[all.reduce((sum, [, size]) => sum + size, 0)].flatMap((size) => [bytes(size), share(size)])]));
  section("What fills the memory", `One device at the step's peak memory: ${bytes(data.memory.bytes)}, ` +
    `${share(data.memory.bytes)} of all it has. Evaluation takes ${bytes(data.memory.evaluation)}.`,
    stack([...stays, ...comes], whole),
    el("div", { class: "pair" }, listed("Stays from step to step", stays), listed("Comes and goes, by the part that makes it", comes)));
}

// A lane's tasks as blocks on the screen; what is too small to tell apart becomes one block.
function blocksOf(lane, tasks, at, width, names) {
  const found = [];
  for (const [, name, about, start, seconds, size, node] of tasks) {
    const left = at(start), right = at(start + seconds), label = names[name], last = found.at(-1);
    if (right < 0 || left > width) continue;
    const adjacent = last && left - last.right < 1.5 && node < 0 && last.node < 0;
    const alike = adjacent && last.label === label && Math.min(right - left, last.tail) < 12;
    const slivers = adjacent && right - left < 1.5 && last.right - last.left < 40 && last.tail < 1.5;
    if (alike || slivers) {
      last.right = Math.max(last.right, right), last.tail = right - left;
      last.end = Math.max(last.end, start + seconds), last.busy += seconds, last.size += size, last.count += 1;
      last.parts.set(label, (last.parts.get(label) ?? 0) + seconds);
      last.label = [...last.parts].reduce((most, one) => (one[1] > most[1] ? one : most))[0];
    } else {
      found.push({ lane, label, about: names[about], start, end: start + seconds, busy: seconds, size, node, left, right,
        tail: right - left, count: 1, parts: new Map([[label, seconds]]) });
    }
  }
  return found;
}
function describeBlock(block, trip) {
  const parts = [...block.parts.keys()].map(words);
  const what = block.count === 1 ? block.about : `${block.count} operations${parts.length > 1 ? `: ${parts.join(", ")}` : ""}`;
  const computing = block.lane === "compute", where = computing ? words(block.label) : `${sent(block.label)} on ${block.lane}`;
  const size = block.size > 0 ? `, ${bytes(block.size)} ${computing ? "of memory traffic" : "sent"}` : "";
  const loop = trip ? `, one turn ${time(trip.seconds)}. Press to open one turn` : "";
  return [el("b", {}, where), ` (${what}): starts at ${time(block.start)}, takes ${time(block.busy)}${size}${loop}.`];
}

// One timeline: the step, or one turn of a loop. `open` is called with a loop's node.
function panel(timeline, place, open) {
  const node = timeline.nodes[place], names = timeline.text, top = 22, label = 17, tall = 28, gap = 8;
  const lanes = LANES.map((name) => ({ name, tasks: node.tasks.filter((task) => names[task[0]] === name) }));
  const height = top + lanes.length * (label + tall + gap);
  const picture = draw("svg", { height, tabindex: 0, role: "application", "aria-label":
    `Timeline of ${words(node.name)}. Arrow keys go from block to block, plus and minus zoom, 0 shows all, Enter opens a loop.` });
  const hint = "Point at a block, or tap it, to see what it is. Blocks with a turning arrow are loops: open one to see a turn.";
  const info = el("p", { class: "info soft", "aria-live": "polite" }, hint);
  const title = place === 0 ? `The whole step: ${time(node.seconds)}` :
    `One turn of ${words(node.name)}: ${time(node.seconds)}${node.unrolled > 1 ? ` (${node.unrolled} layers together)` : ""}`;
  let view = [0, node.seconds], blocks = [], picked = null, drag = null;
  const width = () => Math.max(picture.clientWidth, 200);
  const at = (seconds) => ((seconds - view[0]) / (view[1] - view[0])) * width();

  function zoom(factor, middle = picked ? (picked.start + picked.end) / 2 : (view[0] + view[1]) / 2) {
    const size = Math.min(node.seconds, Math.max(node.seconds / 5000, (view[1] - view[0]) * factor));
    const share = (middle - view[0]) / (view[1] - view[0]);
    move(middle - size * Math.min(1, Math.max(0, share)), size);
  }
  function move(start, size = view[1] - view[0]) {
    start = Math.min(Math.max(0, start), node.seconds - size);
    view = [start, start + size];
    render();
  }
  function pick(block) {
    picked = block;
    info.replaceChildren(...describeBlock(block, timeline.nodes[block.node]));
    picture.querySelector(".picked")?.classList.remove("picked");
    block.mark?.classList.add("picked");
  }
  function axis() {
    const rough = (view[1] - view[0]) / Math.max(2, Math.floor(width() / 110)), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) {
      const x = at(tick), close = x > width() - 40;
      picture.append(draw("line", { x1: x, x2: x, y1: 14, y2: height, stroke: "var(--line)" }),
        draw("text", { x: close ? x - 2 : x + 2, y: 11, "text-anchor": close ? "end" : "start" }, time(tick)));
    }
  }
  // In a loop's place each lane shows how full it is inside: by height, by kind.
  function fullness(name, y) {
    for (const [, , , start, seconds, , inner] of lanes[0].tasks) {
      if (inner < 0) continue;
      const trip = timeline.nodes[inner], x = at(start), w = Math.max(1, at(start + seconds) - x);
      let floor = y + tall;
      for (const [on, kind, busy] of [...trip.sent].sort((a, b) => b[2] - a[2])) {
        const size = on === name ? Math.min((tall * busy) / trip.seconds, floor - y) : 0;
        if (size < 0.2) continue;
        floor -= size;
        picture.append(draw("rect", { x, y: floor, width: w, height: size, fill: link(kind) }, draw("title", {},
          `${sent(kind)}: ${percent(busy / trip.seconds)} of the loop's time`)));
      }
    }
  }
  function mark(block, y) {
    const { left, right, node: inner } = block, trip = timeline.nodes[inner];
    const x = Math.max(left, -2), w = Math.max(1, Math.min(right, width() + 2) - x - (right - left > 4 ? 0.8 : 0));
    // Not on entering: blocks that are drawn anew below a resting pointer are not pointed at.
    const group = draw("g", { "data-loop": trip && inner, role: trip && "button", "aria-label": trip && words(block.label),
      onpointermove: () => { if (picked !== block) pick(block); }, onclick: () => { pick(block); if (trip) open(inner); } });
    block.mark = draw("rect", { x, y, width: w, height: tall, rx: w > 6 ? 2 : 0, stroke: trip && "var(--attention)",
      fill: trip ? "var(--track)" : colour(block.lane, block.label) });
    group.append(block.mark);
    if (trip) {
      const full = (tall - 2) * Math.min(1, trip.computed / trip.seconds);
      group.append(draw("rect", { x: x + 1, y: y + tall - 1 - full, width: Math.max(0, w - 2), height: full,
        fill: "var(--compute)", "pointer-events": "none" }));
    }
    const computing = block.lane === "compute", said = computing ? words(block.label) : sent(block.label);
    const text = trip ? `\u21bb ${said}` : said, fits = Math.floor((w - 8) / 6.2);
    if (fits >= Math.min(text.length, 6)) {
      group.append(draw("text", { class: trip || (computing && pale(block.label)) ? "ink" : "on", x: x + 5, y: y + tall / 2 + 4 },
        text.length > fits ? `${text.slice(0, fits - 1)}\u2026` : text));
    }
    picture.append(group);
    if (picked && picked.lane === block.lane && picked.start === block.start) pick(block);
  }
  function render() {
    picture.replaceChildren();
    axis();
    blocks = lanes.map(({ name, tasks }, lane) => {
      const y = top + lane * (label + tall + gap) + label;
      const title = ["computing", `${name} (fast link)`, `${name} (slow link)`][lane] ?? name;
      picture.append(draw("text", { x: 0, y: y - 5 }, title),
        draw("rect", { x: 0, y, width: width(), height: tall, fill: "var(--track)" }));
      if (name !== "compute") fullness(name, y);
      const found = blocksOf(name, tasks, at, width(), names);
      found.forEach((block) => mark(block, y));
      return found;
    });
  }
  function onkeydown(event) {
    const lane = Math.max(0, picked ? LANES.indexOf(picked.lane) : 0), row = blocks[lane];
    const place = row.includes(picked) ? row.indexOf(picked) : row.findLastIndex((one) => one.start <= picked?.start);
    const beside = (other) => blocks[other]?.find((one) => one.end > (picked?.start ?? 0)) ?? blocks[other]?.at(-1);
    const keys = { ArrowRight: () => row[place + 1], ArrowLeft: () => row[Math.max(0, place - 1)],
      ArrowDown: () => beside(lane + 1), ArrowUp: () => beside(lane - 1) };
    const acts = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => move(0, node.seconds),
      Enter: () => picked?.node >= 0 && open(picked.node) };
    if (event.ctrlKey || event.metaKey || !(event.key in keys || event.key in acts)) return;
    event.preventDefault();
    acts[event.key]?.();
    const next = keys[event.key]?.();
    if (next) pick(next);
  }
  const seconds = (event) => view[0] + ((event.clientX - picture.getBoundingClientRect().left) / width()) * (view[1] - view[0]);
  picture.addEventListener("keydown", onkeydown);
  picture.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, seconds(event));
  }, { passive: false });
  picture.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, start: view[0], far: false }; });
  picture.addEventListener("pointermove", (event) => {
    if (!drag || !event.buttons || (!drag.far && Math.abs(event.clientX - drag.x) < 5)) return;
    if (!drag.far) picture.setPointerCapture(event.pointerId);
    drag.far = true;
    move(drag.start - ((event.clientX - drag.x) / width()) * (view[1] - view[0]));
  });
  for (const over of ["pointerup", "pointercancel"]) picture.addEventListener(over, () => { drag = null; });
  const button = (text, said, act) => el("button", { type: "button", "aria-label": said, title: said, onclick: act }, text);
  const made = el("div", { class: "panel" }, el("div", { class: "tools" }, el("h3", {}, title), el("span", {},
    button("+", "zoom in", () => zoom(0.5)), " ", button("\u2212", "zoom out", () => zoom(2)), " ",
    button("all", "show all", () => move(0, node.seconds)))), picture, info);
  let drawn = 0;
  new ResizeObserver(() => { if (drawn !== width()) { drawn = width(); render(); } }).observe(picture);
  return made;
}

function timelines() {
  const host = el("div", {}), legend = el("ul", { class: "legend" });
  function show(timeline) {
    legend.replaceChildren(...key(timeline));
    const opener = (level) => (place) => {
      while (host.children.length > level + 1) host.lastChild.remove();
      host.append(panel(timeline, place, opener(level + 1)));
    };
    host.replaceChildren();
    opener(-1)(0);
    const loops = timeline.nodes[0].tasks.filter((task) => task[6] >= 0).sort((a, b) => b[4] - a[4]);
    if (loops.length) opener(0)(loops[0][6]);
  }
  const chosen = (name) => data.timelines.find((one) => one.plan === name);
  const called = (name) => (name === best.name ? "the chosen plan" : name.split(" ")[0] === "2" ? "the runner-up" : name);
  const choice = el("select", { "aria-label": "plan to draw", onchange: () => show(chosen(choice.value)) },
    data.timelines.map((one) => el("option", { value: one.plan }, called(one.plan))));
  const entry = (background, text) => el("li", {}, swatch(background), text);
  function key(timeline) {
    const present = new Set(timeline.nodes.flatMap((node) => node.sent.map(([, name]) => name)));
    return [entry("var(--experts)", "computing: experts"), entry("var(--attention)", "attention"), entry("var(--compute)", "other"),
      ...CLASSES.filter((name) => present.has(name)).map((name) => entry(link(name), `sending: ${words(name)}`)),
      entry(link(""), "small sums")];
  }
  const { share } = data.timelines[0];
  section("The step, moment by moment", "Time runs to the right. The first lane is what a device computes, the others are its " +
    "links. Where the first lane is empty, the device waits. A loop runs its turns one after the other; its height in each lane says " +
    "how busy that lane is inside, and one turn of the longest is drawn below. Drag to move; hold Ctrl and scroll to zoom.",
    share < 1 ? el("p", {}, `Drawn as if all layers were like ${percent(share)} of them; the others go in rounds.`) : null,
    el("div", { class: "tools choice" }, el("span", {}, "Drawn:"), choice),
    legend, host);
  show(data.timelines[0]);
}

function plans() {
  const heads = [["plan", "name"], ["mesh", "mesh", "wide"], ["route", "route", "wide"], ["codecs and memory", "rest", "wide"],
    ["memory", "memory_bytes"], ["ms a step", "seconds"], ["to the best", "ratio"]];
  const body = el("tbody", {});
  const rows = data.plans.map((one) => row(one));
  const numbers = ["memory_bytes", "seconds", "ratio"];
  const headers = heads.map(([name, key]) => el("th", { scope: "col", class: numbers.includes(key) ? "num" : null },
    el("button", { type: "button", onclick: () => sort(key) }, name)));
  function row(one) {
    const detail = el("tr", { class: "detail", hidden: "" }), called = one === best ? `${one.name} chosen` : one.name;
    const toggle = el("button", { type: "button", "aria-expanded": "false", onclick: () => {
      if (!detail.hasChildNodes()) detail.append(el("td", { colspan: heads.length }, details(one)));
      detail.hidden = !detail.hidden;
      toggle.setAttribute("aria-expanded", String(!detail.hidden));
      toggle.firstChild.data = detail.hidden ? "\u25b8 " : "\u25be ";
    } }, "\u25b8 ", called);
    const wide = (text) => el("td", { class: text === "-" ? "wide none" : "wide" }, text);
    const line = el("tr", { class: one === best ? "first" : null }, el("td", {}, toggle),
      wide(one.mesh), wide(one.route), wide(one.rest.replaceAll("_", " ")),
      el("td", { class: `num ${one.fits ? "" : "bad large"}`, }, bytes(one.memory_bytes)),
      el("td", { class: "num", "data-unit": "ms" }, ms(one.seconds)),
      el("td", { class: "num", "data-unit": "\u00d7" }, (one.seconds / best.seconds).toFixed(2)));
    return { one: { ...one, ratio: one.seconds / best.seconds }, nodes: [line, detail] };
  }
  let order = ["seconds", 1];
  function sort(key) {
    order = [key, order[0] === key ? -order[1] : 1];
    const compare = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    rows.sort((a, b) => order[1] * compare(a.one[key], b.one[key]));
    mark();
  }
  function mark() {
    headers.forEach((head, place) => heads[place][1] === order[0]
      ? head.setAttribute("aria-sort", order[1] > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    body.append(...rows.flatMap((one) => one.nodes));
  }
  mark();
  const { meshes, traced, too_large: large, seconds } = data.search;
  section("The plans it was chosen from", `${meshes.toLocaleString("en")} ways to spread the model were estimated, ` +
    `${traced} programs traced and priced, ${large} of them too large, in ${round(seconds)} s. ` +
    `Press a heading to sort, a plan to ` +
    `open it. What people take without a planner stands beside them, each made to fit: ${Object.entries(data.rules)
      .map(([name, said]) => `${name}: ${said}`).join("; ")}.`,
    el("table", { class: "plans" }, el("thead", {}, el("tr", {}, headers)), body));
}
function details(one) {
  if (one === best) return el("p", {}, "This is the plan that was chosen.");
  const slower = one.seconds > best.seconds * (1 + 1e-9);
  const needs = one.changes === null ? [el("p", {}, "Only the first five plans and the best rule of thumb are asked.")] : !slower
    ? [el("p", {}, one.fits ? "Nothing: it is as fast." : "Nothing: it is as fast, but does not fit.")] : changes(one);
  if (!one.fits) {
    const available = bytes(data.cluster.memory_bytes);
    needs.push(el("p", { class: "bad" }, `It needs ${bytes(one.memory_bytes)} of ${available}, whatever the rates.`));
  }
  return el("div", { class: "pair" }, el("div", {}, el("h3", {}, "What its step is made of"), against(one)),
    el("div", {}, el("h3", {}, "What would have to change for it to win"), needs));
}
function changes(one) {
  const far = ({ factor }) => Math.abs(Math.log(factor));
  const found = one.changes.filter(({ factor }) => factor !== null).sort((a, b) => far(a) - far(b));
  const never = one.changes.filter(({ factor }) => factor === null).map(({ rate }) => rate);
  const rows = found.map(({ rate, factor }) => [rate, times(factor)]);
  return [rows.length ? table(["this alone", "would have to be"], rows) : null, never.length ? el("p", { class: "soft" },
    `None of these alone would do it, from 16 \u00d7 worse to 16 \u00d7 better: ${never.join("; ")}.`) : null];
}

headline();
terms();
timelines();
traffic();
memory();
plans();
main.append(el("p", { class: "soft" }, "All figures are predictions, of one device, made from the traced " +
  "program and these numbers of the cluster: ",
  data.cluster.source));
