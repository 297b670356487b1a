// A node's readings: one small chart for each sensor, one line for each card. A chosen card stands
// out in all of them; a crosshair reads every card at one moment; the numbers are in the table.

import { ask, clock, element, figure, keepAsking, ticksOf, tickStep } from "./svg.js";

const METRICS = [
  { key: "temperature_c", title: "Temperature", unit: "°C" },
  { key: "power_w", title: "Power", unit: "W" },
  { key: "sm_clock_mhz", title: "SM clock", unit: "MHz" },
  { key: "utilization", title: "Utilisation", unit: "%", low: 0 },
  { key: "memory_used_bytes", title: "Memory used", unit: "GiB", factor: 1 / 2 ** 30, low: 0 },
  { key: "ecc_corrected", title: "ECC corrected", unit: "", low: 0, counts: true },
  { key: "ecc_uncorrected", title: "ECC uncorrected", unit: "", low: 0, counts: true },
  { key: "pcie_replays", title: "PCIe replays", unit: "", low: 0, counts: true },
];
const HEIGHT = 128, LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 108;

const box = document.getElementById("readings");
const head = document.getElementById("readings-read");
const table = document.getElementById("readings-table");
const picker = document.getElementById("readings-cards");
const every = { "10m": 5000, "1h": 15000, "1d": 60000 }[box.dataset.window];
let told = null;
let chosen = faulty()[0] ?? null; // a card's index
let moment = null; // index of the time under the crosshair

async function update() {
  const query = new URLSearchParams({ window: box.dataset.window });
  const { news } = await ask(`${box.dataset.url}?${query}`);
  if (!news) return;
  told = news;
  offer();
  tell();
  draw();
}

/** The cards that have an open fault, as the table of cards tells, which is live. */
function faulty() {
  return [...document.querySelectorAll("#node-cards tr.row--bad")].map(({ dataset }) => Number(dataset.card));
}

// Buttons are made anew only where cards came or went: one of them may be in use.
function offer() {
  const cards = told.cards.map(({ index }) => index);
  const offered = [...picker.children].map(({ dataset }) => Number(dataset.card));
  if (String(cards) === String(offered)) return;
  if (!cards.includes(chosen)) chosen = null;
  picker.replaceChildren(...cards.map((card) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.card = card;
    button.textContent = `GPU ${card}`;
    return button;
  }));
}

// The table of cards is sent anew when something changes; readings are no change.
function tell() {
  for (const { index, present } of told.cards) {
    for (const cell of document.querySelectorAll(`#node-cards [data-card="${index}"] [data-reading]`)) {
      const value = present[cell.dataset.reading];
      cell.textContent = figure(value == null ? null : Math.round(value));
    }
  }
}

// --- Drawing -------------------------------------------------------------------------------------

function draw() {
  if (!told) return;
  if (told.at.length === 0) {
    const none = document.createElement("p");
    none.className = "empty";
    none.textContent = "No reading was kept over this time. Readings are kept while the node’s agent beats.";
    box.replaceChildren(none);
    moment = null;
    pick();
    point();
    fill();
    return;
  }
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...METRICS.map(chart));
  if (focused) box.querySelector(`[data-key="${focused}"]`).focus({ preventScroll: true });
  pick();
  point();
  fill();
}

function valuesOf(card, { key, factor = 1 }) {
  return card[key].map((value) => (value == null ? null : value * factor));
}

function chart(metric) {
  const figureBox = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const last = document.createElement("span");
  last.className = "quiet";
  last.dataset.last = metric.key;
  caption.append(metric.title, metric.unit ? ` (${metric.unit}) ` : " ", last);
  figureBox.append(caption, drawing(metric));
  return figureBox;
}

function drawing(metric) {
  const width = Math.max(240, (box.clientWidth - 42) / (box.clientWidth > 900 ? 4 : box.clientWidth > 560 ? 2 : 1));
  const x = (at) => LEFT + ((at - told.from) / (told.to - told.from)) * (width - LEFT - RIGHT);
  const lines = told.cards.map((card) => ({ card, values: valuesOf(card, metric) }));
  const { y, ticks, digits } = scale(lines.flatMap(({ values }) => values), metric);
  const svg = element("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, tabindex: 0, role: "img", "data-key": metric.key,
    "aria-label": `${metric.title} of each card over time. Arrow keys read the values; the numbers are in the table below.`,
  },
    ...ticks.flatMap((value) => [
      element("line", { class: "c-grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      element("text", { class: "c-tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(digits)),
    ]),
    ...times(width, x),
    ...lines.map(({ card, values }) =>
      element("path", { class: "r-line", "data-card": card.index, d: path(values, x, y) })),
    element("g", { class: "c-hair" }),
  );
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const scaleX = width / svg.getBoundingClientRect().width;
    moment = nearest(at * scaleX, x);
    point();
  });
  svg.addEventListener("pointerleave", () => {
    moment = null;
    point();
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") moment = null;
    else if (!by) return;
    else moment = Math.max(0, Math.min(told.at.length - 1, (moment ?? told.at.length - 1) + by));
    event.preventDefault();
    point();
  });
  Object.assign(svg, { place: { x, y, lines } });
  return svg;
}

function scale(values, { low: floor, counts }) {
  const known = values.filter((value) => value != null);
  let low = floor ?? Math.min(...known);
  let high = Math.max(...known, floor === undefined ? -Infinity : floor + 1);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
  if (high - low < 1e-9) [low, high] = [floor ?? low - 1, high + 1];
  const room = (high - low) * 0.08;
  const bottom = floor ?? low - room;
  const top = high + room;
  const { step, ticks: all } = ticksOf(bottom, top, 3);
  const ticks = counts ? all.filter(Number.isInteger) : all;
  const digits = step >= 1 || counts ? 0 : Math.min(3, Math.ceil(-Math.log10(step)));
  return { ticks, digits, y: (value) => BOTTOM - ((value - bottom) / (top - bottom)) * (BOTTOM - TOP) };
}

function times(width, x) {
  const step = tickStep(told.to - told.from, 4);
  const made = [];
  for (let at = Math.ceil(told.from / step) * step; at <= told.to; at += step) {
    if (x(at) > width - 24 || x(at) < LEFT + 14) continue;
    made.push(element("text", { class: "c-tick", x: x(at), y: HEIGHT - 4, "text-anchor": "middle" }, clock(at).slice(0, 5)));
  }
  return made;
}

function path(values, x, y) {
  let drawn = "", pen = "M";
  values.forEach((value, index) => {
    if (value == null) {
      pen = "M";
      return;
    }
    drawn += `${pen}${x(told.at[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  // A single point between two gaps is a dot.
  return drawn.replace(/M(\S+ \S+)(?=M|$)/g, "M$1h.01");
}

// --- Reading -------------------------------------------------------------------------------------

function nearest(at, x) {
  let best = 0;
  told.at.forEach((value, index) => {
    if (Math.abs(x(value) - at) < Math.abs(x(told.at[best]) - at)) best = index;
  });
  return best;
}

function point() {
  if (told.at.length === 0) {
    head.textContent = "";
    return;
  }
  const index = moment === null ? told.at.length - 1 : Math.min(moment, told.at.length - 1);
  for (const metric of METRICS) {
    const svg = box.querySelector(`svg[data-key="${metric.key}"]`);
    const { x, y, lines } = svg.place;
    const hair = svg.querySelector(".c-hair");
    hair.replaceChildren();
    const at = x(told.at[index]);
    if (moment !== null) hair.append(element("line", { x1: at, x2: at, y1: TOP, y2: BOTTOM }));
    const line = lines.find(({ card }) => card.index === chosen);
    if (moment !== null && line?.values[index] != null) hair.append(element("circle", { cx: at, cy: y(line.values[index]), r: 3 }));
    box.querySelector(`[data-last="${metric.key}"]`).textContent = line ? figure(line.values[index]) : spread(lines, index);
  }
  const at = `${clock(told.at[index])} UTC`;
  const when = moment !== null ? at : isFresh() ? "now" : `last read ${at}`;
  head.textContent = `${chosen === null ? "all cards, lowest to highest" : `GPU ${chosen}`}, ${when}`;
}

/** Whether anything is known of the present: the server says how old a reading may be for that. */
function isFresh() {
  return told.cards.some(({ present }) => Object.values(present).some((value) => value != null));
}

function spread(lines, index) {
  const known = lines.map(({ values }) => values[index]).filter((value) => value != null);
  if (!known.length) return "–";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return figure(low) === figure(high) ? figure(low) : `${figure(low)}–${figure(high)}`;
}

function pick() {
  for (const line of box.querySelectorAll(".r-line")) {
    line.classList.toggle("r-line--chosen", Number(line.dataset.card) === chosen);
  }
  const bad = faulty();
  for (const button of picker.children) {
    const card = Number(button.dataset.card);
    button.setAttribute("aria-pressed", String(card === chosen));
    button.classList.toggle("picker--bad", bad.includes(card));
  }
}

function fill() {
  if (!table.closest("details").open || !told) return;
  const shown = told.cards.filter(({ index }) => chosen === null || index === chosen);
  const rows = [];
  for (let index = told.at.length - 1; index >= 0 && rows.length < 400; index -= 1) {
    for (const card of shown) {
      const cells = [clock(told.at[index]), card.index, ...METRICS.map((metric) => figure(valuesOf(card, metric)[index]))];
      const row = document.createElement("tr");
      cells.forEach((text, place) => {
        const cell = document.createElement("td");
        if (place) cell.className = "num";
        cell.textContent = text;
        row.append(cell);
      });
      rows.push(row);
    }
  }
  table.tBodies[0].replaceChildren(...rows);
}

picker.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const card = Number(button.dataset.card);
  chosen = chosen === card ? null : card;
  pick();
  point();
  fill();
});
table.closest("details").addEventListener("toggle", fill);
let before = 0;
new ResizeObserver(() => {
  if (box.clientWidth === before) return;
  before = box.clientWidth;
  draw();
}).observe(box);
document.addEventListener("htmx:afterSettle", pick);
keepAsking(update, every);
