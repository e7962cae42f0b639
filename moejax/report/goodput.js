"use strict";
// Where a run's time went, and what happened to its processes. page.js calls `goodput`, and has all that this uses.
const CLASSES = {
  training: "#468f35", "steps done again": "#c2452d", "steps rolled back": "#e58fa2", "waiting for data": "#d9822b", start: "#8656c4", restore: "#c0458f", compile: "#2b78d4",
  evaluation: "#12908f", saving: "#a8812f", "waiting for sites": "#5f6b1f", "down between starts": "#7a2318", "not told": "#8a9099" };
// An axis has one unit: its seconds, its name, and up to how many seconds it is good for.
const UNITS = [[1, "s", 300], [60, "min", 18e3], [3600, "h", 4e5], [86400, "d", Infinity]];
const unit = (total) => UNITS.find(([, , most]) => total < most);
const OUTCOMES = { error: "an error", hang: "a hang", silent: "no last word" };

function goodput(run) {
  const known = run.goodput;
  if (!known) return;
  const total = Object.values(known.seconds).reduce((sum, s) => sum + s, 0);
  const sorted = Object.entries(known.seconds).sort(([, a], [, b]) => b - a);
  const share = (s) => percent(total ? s / total : 0), of = (one, format) => one == null ? "-" : format(one);
  const summary = table(names("goodput#", "wall time#", "starts#", "steps lost#", "time to recover, median#", "longest#"), [[percent(known.goodput), seconds(total),
    (known.number + 1).toLocaleString("en"), known.lost.toLocaleString("en"), of(known.recovery?.[0], seconds), of(known.recovery?.[1], seconds)]]);
  section(`Goodput${runs.length > 1 ? `: ${run.name}` : ""}`, "The share of time in steps that count; steps that a later start did again, or that the run rolled back, do not. " +
    "To recover is from the last word of a start until the next one has done steps.", summary,
    el("h3", {}, "Where the time went"), el("ul", { class: "key" }, sorted.map(([name, s]) => el("li", {}, el("i", { style: `background:${CLASSES[name]}` }), `${name} ${share(s)}`))),
    timeBar(sorted, share, total), el("h3", {}, "Processes over time"), starts(run, known), restarts(known));
}
const hint = () => ({ confine: true, backgroundColor: style("card"), borderColor: style("line"), textStyle: { color: style("ink"), fontSize: 12 },
  extraCssText: "max-width: min(34rem, 90vw); white-space: normal; overflow-wrap: anywhere" });
function timeBar(sorted, share, total) {
  const [length, name] = unit(total);
  const chart = new Chart("", () => ({ animation: false, grid: { left: 8, right: 14, top: 4, bottom: 4, containLabel: true },
    tooltip: { ...hint(), formatter: ({ seriesName, value }) => safe(`${seriesName}: ${seconds(value * length)}, ${share(value * length)}`) },
    xAxis: { type: "value", max: "dataMax", axisLabel: { color: style("soft"), hideOverlap: true, showMaxLabel: false, formatter: (value) => `${round(value, 3)} ${name}` }, splitLine: { show: false } },
    yAxis: { type: "category", data: [""], show: false },
    series: sorted.map(([name, s]) => ({ name, type: "bar", stack: "one", data: [s / length], barWidth: "90%", itemStyle: { color: CLASSES[name] } })) }),
  { zooms: false, label: "Time of the run by class" });
  chart.node.style.height = "4.6rem";
  return chart.node;
}
// A row a process: a bar from each start to its last word, a tick for each save, a diamond where a start failed.
function starts(run, known) {
  const rows = known.processes, ends = rows.flatMap((one) => one.starts.map(([, ended]) => ended)), [length, name] = unit(Math.max(0, ...ends));
  const lasts = rows.map((one) => one.starts.length - 1), after = (s) => `${seconds(s)} after the first start`;
  const mark = (name, symbol, symbolSize, color, data) => ({ name, type: "scatter", symbol, symbolSize, itemStyle: { color, opacity: 0.9 }, data });
  const chart = new Chart("", () => {
    const bars = [], saves = [], begun = [], failed = [];
    rows.forEach((one, row) => {
      for (const save of one.saves) saves.push({ value: [save / length, row], said: `saved, ${after(save)}` });
      one.starts.forEach(([began, ended, outcome, how], place) => {
        bars.push([began / length, row], [ended / length, row], [null, null]);
        begun.push({ value: [began / length, row], said: `started, ${after(began)}` });
        // Without a last word the newest start may still be running.
        if (OUTCOMES[outcome] && !(outcome === "silent" && place === lasts[row])) failed.push({ value: [ended / length, row], said: `${OUTCOMES[outcome]}, ${after(ended)}: ${how}` });
      });
    });
    return { animation: false, textStyle: { fontFamily: "system-ui, sans-serif", color: style("ink") }, grid: { left: 8, right: 18, top: 8, bottom: 4, containLabel: true },
      tooltip: { ...hint(), trigger: "item", formatter: ({ data }) => safe(`process ${rows[data.value[1]].process}: ${data.said}`) },
      xAxis: { type: "value", min: 0, max: "dataMax", axisLabel: { color: style("soft"), hideOverlap: true, showMaxLabel: false, formatter: (value) => `${round(value, 3)} ${name}` }, splitLine: { show: false } },
      yAxis: { type: "category", inverse: true, data: rows.map((one) => `process ${one.process}`), axisLabel: { color: style("soft") }, axisTick: { show: false } },
      series: [{ name: "running", type: "line", data: bars, symbol: "none", connectNulls: false, silent: true, lineStyle: { width: 9, color: run.colour, opacity: 0.35 } },
        mark("started", "triangle", 9, run.colour, begun), mark("saved", "rect", [2, 11], style("soft"), saves), mark("failed", "diamond", 12, style("bad"), failed)] };
  }, { zooms: false, label: "Starts, saves and faults of each process" });
  chart.node.style.height = `${3.5 + 1.5 * rows.length}rem`;
  const more = [known.processes_left_out ? `${known.processes_left_out.toLocaleString("en")} processes more are left out; those that failed first are shown.` : "",
    known.read_whole ? "" : "Of long logs the newest part was read."].filter(Boolean).join(" ");
  return [chart.node, el("p", { class: "caption" }, "Triangles are starts, ticks are saves, diamonds are where a start failed. A process writes down its steps every ten seconds, so its last word may be that old.", more ? ` ${more}` : "")];
}
function restarts(known) {
  if (!known.number) return el("p", { class: "soft" }, "No restarts.");
  const utc = (s) => new Date((known.began + s) * 1000).toISOString().slice(0, 19).replace("T", " ");
  const rows = [...known.restarts].reverse().map((one) => [utc(one.time), one.step.toLocaleString("en"), one.lost.toLocaleString("en"), seconds(one.down),
    one.recovered == null ? "-" : seconds(one.recovered), one.first == null ? "-" : `process ${one.first}`, one.how]);
  return el("details", rows.length <= 10 ? { open: "" } : {}, el("summary", {}, known.restarts_left_out ? `The newest ${rows.length} of ${known.number.toLocaleString("en")} restarts` : `Restarts: ${rows.length}`),
    table(names("time (UTC)", "at step#", "steps lost#", "down#", "to next steps#", "failed first", "how the start before ended"), rows));
}
