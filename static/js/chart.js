// A job's curves: loss above throughput over one time axis, with interruptions and checkpoints.
// Fetches what is new each second and appends; drawn as SVG, so that CSS gives the colours and
// marks are links.

import { ask, clock, day, DAY_S, element, figure, keepAsking, tickStep } from "./svg.js";

const LEFT = 52, RIGHT = 62, LANE = 36, LOSS = 132, BETWEEN = 22, RATE = 92, CKPT = 22, AXIS = 20;
const RATE_TOP = LANE + LOSS + BETWEEN;
const BOTTOM = RATE_TOP + RATE;
const HEIGHT = BOTTOM + CKPT + AXIS;
const COLUMNS = ["step", "at", "loss", "throughput", "gap_s"];
const WINDOW_S = { "5m": 300, "30m": 1800, "6h": 21600, all: Infinity };

const box = document.getElementById("chart");
const body = document.querySelector("#chart-table tbody");
const series = Object.fromEntries(COLUMNS.map((name) => [name, []]));
const marks = new Map(); // epoch -> mark
const checkpoints = new Map(); // step and tier -> checkpoint
let cursor = null; // index of the point under the crosshair

/** A moment, with its day where the curves are of more than one. */
const moment = (at) =>
  series.at.at(-1) - series.at[0] > DAY_S ? `${day(at)} ${clock(at)}` : clock(at);
const span = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

// --- What is new ---------------------------------------------------------------------------------

async function update() {
  if (series.step.length > 2500) for (const name of COLUMNS) series[name].length = 0;
  const query = new URLSearchParams({ window: box.dataset.window });
  if (series.at.length) query.set("after", series.at.at(-1));
  const { heard, news } = await ask(`${box.dataset.url}?${query}`);
  if (!news) return heard;
  for (const name of COLUMNS) series[name].push(...news[name]);
  for (const mark of news.marks) marks.set(mark.epoch, mark);
  for (const one of news.checkpoints) checkpoints.set(`${one.step} ${one.tier}`, one);
  forgetOld();
  draw();
  fillTable();
  return heard;
}

function forgetOld() {
  const since = series.at.at(-1) - WINDOW_S[box.dataset.window];
  const old = series.at.findIndex((at) => at >= since);
  if (old > 0) for (const name of COLUMNS) series[name].splice(0, old);
}

// --- Drawing -------------------------------------------------------------------------------------

function draw() {
  if (series.at.length < 2) return;
  const width = Math.max(320, box.clientWidth);
  const from = series.at[0];
  const to = series.at.at(-1);
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  const loss = scale(series.loss, LANE, LOSS, false);
  const rate = scale(series.throughput, RATE_TOP, RATE, true);
  const shown = [...marks.values()].filter((mark) => mark.at >= from && mark.at <= to);

  const svg = element(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, tabindex: 0, role: "img",
      "aria-label": "Loss and throughput over time. Arrow keys read the values; the numbers are in the table below." },
    ...degraded(from, to, x),
    ...axis("loss", loss, width),
    ...axis("samples/s", rate, width),
    ...timeAxis(from, to, x),
    element("path", { class: "c-area", d: area(series.throughput, x, rate.y) }),
    element("path", { class: "c-rate", d: line(series.throughput, x, rate.y) }),
    element("path", { class: "c-loss", d: line(series.loss, x, loss.y) }),
    ...ends(width, loss, rate),
    ...checkpointTicks(from, to, x),
    ...markLines(shown, x, width),
  );
  const hair = element("g", { class: "c-hair", visibility: "hidden" });
  svg.append(hair);
  const focused = box.contains(document.activeElement) && document.activeElement.tagName === "svg";
  box.replaceChildren(readout(), svg);
  if (focused) svg.focus({ preventScroll: true });
  watch(svg, hair, x, loss, rate);
  if (cursor !== null) point(Math.min(cursor, series.at.length - 1), hair, x, loss, rate);
}

// A vertical scale over the values' range, with round ticks.
function scale(values, top, height, fromZero) {
  const known = values.filter((value) => value != null);
  let low = fromZero ? 0 : Math.min(...known);
  let high = Math.max(...known, fromZero ? 1 : -Infinity);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const room = (high - low) * 0.08;
  if (!fromZero) low -= room;
  high += room;
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough) * unit;
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) ticks.push(value);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (String(step / unit).includes(".") ? 1 : 0));
  return { top, height, ticks, digits, y: (value) => top + height - ((value - low) / (high - low)) * height };
}

/** Whether nothing was told for long before this point: the job stood still, or was not there. */
function hole(index) {
  const usual = (series.at.at(-1) - series.at[0]) / series.at.length;
  return index > 0 && series.at[index] - series.at[index - 1] > Math.max(20, 8 * usual);
}

function line(values, x, y) {
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value == null || hole(index)) pen = "M";
    if (value == null) return;
    path += `${pen}${x(series.at[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

/** Each unbroken stretch of the line, closed down to the axis. */
function area(values, x, y) {
  let path = "";
  let last = null;
  values.forEach((value, index) => {
    const at = x(series.at[index]).toFixed(1);
    if (last !== null && hole(index)) {
      path += `L${last} ${BOTTOM}Z`;
      last = null;
    }
    if (value != null) path += `${last === null ? `M${at} ${BOTTOM}` : ""}L${at} ${y(value).toFixed(1)}`;
    else if (last !== null) path += `L${last} ${BOTTOM}Z`;
    last = value == null ? null : at;
  });
  return last === null ? path : `${path}L${last} ${BOTTOM}Z`;
}

function axis(title, { top, height, ticks, digits, y }, width) {
  return [
    ...ticks.flatMap((value) => [
      element("line", { class: "c-grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      element("text", { class: "c-tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(digits)),
    ]),
    element("text", { class: "c-title", x: LEFT, y: top - 6 }, title),
    element("line", { class: "c-base", x1: LEFT, x2: width - RIGHT, y1: top + height, y2: top + height }),
  ];
}

function timeAxis(from, to, x) {
  const step = tickStep(to - from, 8);
  const told = (at) =>
    to - from > DAY_S && at % DAY_S === 0 ? day(at).slice(5) : clock(at).slice(0, step < 60 ? 8 : 5);
  const made = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    made.push(
      element("line", { class: "c-notch", x1: x(at), x2: x(at), y1: BOTTOM + CKPT, y2: BOTTOM + CKPT + 4 }),
      element("text", { class: "c-tick", x: x(at), y: HEIGHT - 3, "text-anchor": "middle" }, told(at)),
    );
  }
  return made;
}

function ends(width, loss, rate) {
  const last = series.at.length - 1;
  return [["c-loss-end", series.loss[last], loss], ["c-rate-end", series.throughput[last], rate]]
    .filter(([, value]) => value != null)
    .map(([name, value, { y }]) =>
      element("text", { class: `c-end ${name}`, x: width - RIGHT + 8, y: y(value) + 4 }, figure(value)));
}

// The stretches in which any replica was missing: from its loss until it joined again.
function degraded(from, to, x) {
  return together(missing(to), from).map(([since, until]) => {
    const width = Math.max(1, x(until) - x(since));
    return element("rect", { class: "c-degraded", x: x(since), y: LANE, width, height: BOTTOM - LANE });
  });
}

/** From when to when each lost replica was missing, whatever of it the curves show. */
function missing(to) {
  const told = [...marks.values()].sort((one, other) => one.at - other.at);
  return told.flatMap(({ at, lost }, index) =>
    lost.map((replica) => {
      const back = told.slice(index).find(({ joined }) => joined.includes(replica));
      return [at, Math.min(to, back?.at ?? to)];
    }));
}

/** Stretches that overlap made one: laid over one another they would look darker. */
function together(stretches, from) {
  const made = [];
  for (const [since, until] of stretches.map(([start, end]) => [Math.max(from, start), end])) {
    const last = made.at(-1);
    if (until <= since) continue;
    if (last && since <= last[1]) last[1] = Math.max(last[1], until);
    else made.push([since, until]);
  }
  return made;
}

function checkpointTicks(from, to, x) {
  const shown = [...checkpoints.values()].filter((one) => one.at >= from && one.at <= to);
  const title = element("text", { class: "c-tick", x: LEFT - 8, y: BOTTOM + 18, "text-anchor": "end" }, "ckpt");
  return [title, ...shown.map((one) => {
    const at = x(one.at);
    const tick = element("path", { class: `c-ckpt c-ckpt--${one.tier}`, d: `M${at - 3.5} ${BOTTOM + 14}l3.5 -5 3.5 5 -3.5 5z` });
    tick.append(element("title", {}, `Checkpoint of step ${one.step} (${one.tier}), ${moment(one.at)} UTC`));
    return tick;
  })];
}

function markLines(shown, x, width) {
  const free = [0, 0]; // the right end of the last label in each of two rows
  return shown.map((mark) => {
    const at = x(mark.at);
    const back = mark.joined.filter((replica) => !mark.moved.includes(replica));
    const words = [
      mark.lost.length ? `lost ${mark.lost.join(", ")}` : "",
      back.length ? `${back.join(", ")} back` : "",
      mark.moved.length ? `${mark.moved.join(", ")} moved` : "",
    ].filter(Boolean).join(", ") || "regrouped";
    const kind = mark.lost.length ? "lost" : "joined";
    const long = words.length * 6.2 + 8;
    const left = Math.min(at, width - RIGHT - long + 8);
    const row = free.findIndex((end) => left > end);
    const group = element(mark.incident ? "a" : "g", { class: `c-mark c-mark--${kind}` });
    if (mark.incident) group.setAttribute("href", box.dataset.incident.replace("ID", mark.incident));
    group.append(
      element("title", {}, `${words}, ${moment(mark.at)} UTC, gap ${span(mark.gap_s)}`),
      element("line", { x1: at, x2: at, y1: row === 1 ? 19 : 6, y2: BOTTOM }),
    );
    if (row >= 0) {
      free[row] = left + long;
      group.append(element("text", { x: left + 4, y: row * 13 + 12 }, words));
    }
    return group;
  });
}

// --- Reading values ------------------------------------------------------------------------------

function readout() {
  const made = document.createElement("p");
  made.className = "chart-read";
  return made;
}

function watch(svg, hair, x, loss, rate) {
  const nearest = (clientX) => {
    const at = clientX - svg.getBoundingClientRect().left;
    let best = 0;
    series.at.forEach((value, index) => {
      if (Math.abs(x(value) - at) < Math.abs(x(series.at[best]) - at)) best = index;
    });
    return best;
  };
  svg.addEventListener("pointermove", (event) => point(nearest(event.clientX), hair, x, loss, rate));
  svg.addEventListener("pointerleave", () => rest(hair));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") rest(hair);
    if (!move) return;
    event.preventDefault();
    const last = series.at.length - 1;
    point(Math.max(0, Math.min(last, (cursor ?? last) + move)), hair, x, loss, rate);
  });
}

function point(index, hair, x, loss, rate) {
  cursor = index;
  const at = x(series.at[index]);
  hair.setAttribute("visibility", "visible");
  hair.replaceChildren(
    element("line", { x1: at, x2: at, y1: LANE, y2: BOTTOM }),
    ...[[series.loss[index], loss], [series.throughput[index], rate]]
      .filter(([value]) => value != null)
      .map(([value, { y }]) => element("circle", { cx: at, cy: y(value), r: 3.5 })),
  );
  box.querySelector(".chart-read").textContent =
    `${moment(series.at[index])} UTC · step ${figure(series.step[index])} · loss ${figure(series.loss[index])}` +
    ` · ${figure(series.throughput[index])} samples/s · longest gap ${span(series.gap_s[index])}`;
}

function rest(hair) {
  cursor = null;
  hair.setAttribute("visibility", "hidden");
  box.querySelector(".chart-read").textContent = "";
}

function fillTable() {
  if (!body.closest("details").open) return;
  const rows = [];
  for (let index = series.at.length - 1; index >= 0 && rows.length < 300; index -= 1) {
    const row = document.createElement("tr");
    const cells = [moment(series.at[index]), series.step[index], figure(series.loss[index]), figure(series.throughput[index]), span(series.gap_s[index])];
    cells.forEach((text, number) => {
      const cell = document.createElement("td");
      if (number) cell.className = "num";
      cell.textContent = text;
      row.append(cell);
    });
    rows.push(row);
  }
  body.replaceChildren(...rows);
}

body.closest("details").addEventListener("toggle", fillTable);
new ResizeObserver(() => draw()).observe(box);
// What an ended job has to tell, it tells once.
keepAsking(update, 1000, { once: box.dataset.live !== "yes" });
