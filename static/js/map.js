// A cluster's map: every GPU as a cell, a node as a row of cells, nodes grouped by rack. Drawn on a
// canvas from one packed answer, so that a hundred thousand cells cost as little as eighty; each
// cell is reached by pointer and by keyboard, and the table below the map holds the same.

import { ask } from "./svg.js";

const MATCHES = 1, HEARD = 2, SPARE = 4, HELD = 8;
const AVAILABLE = "Available";
/** Cell and gap in pixels, by how many nodes there are; names stand beside the largest only. */
const SIZES = [
  { upTo: 64, cell: 14, gap: 2, names: true },
  { upTo: 512, cell: 9, gap: 1, names: false },
  { upTo: 3000, cell: 6, gap: 1, names: false },
  { upTo: Infinity, cell: 4, gap: 1, names: false },
];
const COLUMN = 48; // at most this many nodes stand below one another
const TITLE = 16, APART = 14;
const RETRY_MS = 1000;

const canvas = document.getElementById("map");
const read = document.getElementById("map-read");
const advice = read.textContent;
const base = document.createElement("canvas"); // all but the cursor
const tip = document.createElement("div");
tip.className = "map-tip";
tip.hidden = true;
canvas.parentElement.append(tip);

let nodes = [];
let blocks = [];
let size = SIZES[0];
let nameWidth = 0;
let cursor = null; // { node: index, card }
let resting = null; // the last the pointer told, while it is above the map
let isAsking = false;
let isWanted = false; // since the last was asked for

// --- What there is -------------------------------------------------------------------------------

/** Ask until there is an answer to the newest change, for one at a time: the newest comes last. */
async function refresh() {
  isWanted = true;
  if (isAsking) return;
  isAsking = true;
  try {
    while (isWanted) {
      isWanted = false;
      const { news } = await ask(canvas.dataset.url + location.search);
      if (news) update(news);
      else {
        isWanted = true;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  } finally {
    isAsking = false;
  }
}

function update(news) {
  unpack(news);
  lay();
  const found = resting && at(resting);
  if (resting) hint(resting, found);
  if (document.activeElement !== canvas) move(found);
  else move(nodes.length ? present(cursor) : null);
}

/** The same place, or the first where that is gone. */
function present(place) {
  return place && place.node < nodes.length ? place : { node: 0, card: 0 };
}

function unpack({ states, jobs, racks }) {
  nodes = [];
  for (const rack of racks) {
    rack.names.split(" ").forEach((name, place) => {
      const [label, colour] = states[rack.states.charCodeAt(place) - 97];
      const flags = parseInt(rack.flags[place], 16);
      nodes.push({
        rack: rack.name,
        name: rack.prefix + name,
        label,
        flags,
        colour: look(label, colour, flags),
        cards: parseInt(rack.cards[place], 36),
        job: jobs[rack.jobs[place]] ?? "",
        faults: rack.faults.filter(([node]) => node === place).map(([, card, code]) => ({ card, code })),
      });
    });
  }
}

function look(label, colour, flags) {
  if (!(flags & HEARD) && colour !== "quiet") return "bad";
  return label === AVAILABLE ? "idle" : colour;
}

// --- Where it stands -----------------------------------------------------------------------------

function lay() {
  size = SIZES.find(({ upTo }) => nodes.length <= upTo);
  const pitch = size.cell + size.gap;
  const width = roomOf(canvas.parentElement);
  nameWidth = size.names ? widest() + 10 : 0;
  blocks = [];
  let x = 0, y = 0, tall = 0;
  for (const column of columns()) {
    const cards = Math.max(1, ...column.map((index) => nodes[index].cards));
    const wide = cards * pitch + nameWidth;
    if (x > 0 && x + wide > width) [x, y, tall] = [0, y + tall + APART, 0];
    blocks.push({ x, y: y + TITLE, wide, column, title: nodes[column[0]].rack });
    tall = Math.max(tall, TITLE + column.length * pitch);
    x += wide + APART;
  }
  resize(base, width, y + tall + 2);
  resize(canvas, width, y + tall + 2);
  paint();
}

function roomOf(frame) {
  const { paddingLeft, paddingRight } = getComputedStyle(frame);
  return frame.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}

function widest() {
  const pen = base.getContext("2d");
  pen.font = nameFont();
  return Math.min(160, Math.max(0, ...nodes.map(({ name }) => pen.measureText(name).width)));
}

const nameFont = () => `11.5px ${getComputedStyle(read).fontFamily}`;

/** Indexes of nodes that stand below one another: a rack, or a part of one that is too tall. */
function columns() {
  const made = [];
  nodes.forEach((node, index) => {
    const last = made.at(-1);
    if (last && nodes[last[0]].rack === node.rack && last.length < COLUMN) last.push(index);
    else made.push([index]);
  });
  return made;
}

function resize(sheet, width, height) {
  sheet.width = Math.round(width * devicePixelRatio);
  sheet.height = Math.round(height * devicePixelRatio);
  sheet.style.width = `${width}px`;
  sheet.style.height = `${height}px`;
}

// --- Drawing -------------------------------------------------------------------------------------

/** The page's own colours: read from the legend, so that light and dark and the legend agree. */
function palette() {
  const found = {};
  for (const swatch of document.querySelectorAll(".legend .swatch")) {
    const style = getComputedStyle(swatch);
    const name = [...swatch.classList].find((one) => one.startsWith("swatch--")).slice(8);
    found[name] = { fill: style.backgroundColor, line: style.borderTopColor };
  }
  return found;
}

function paint() {
  const colours = palette();
  const pen = base.getContext("2d");
  const ink = getComputedStyle(read);
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, base.width, base.height);
  for (const block of blocks) {
    pen.globalAlpha = 1;
    pen.fillStyle = ink.color;
    pen.font = `${size.cell > 8 ? 11 : 9}px ${ink.fontFamily}`;
    pen.fillText(block.title, block.x, block.y - 5, block.wide);
    block.column.forEach((index, row) => paintNode(pen, nodes[index], block, row, colours, ink));
  }
  show();
}

function paintNode(pen, node, block, row, colours, ink) {
  const pitch = size.cell + size.gap;
  const y = block.y + row * pitch;
  let x = block.x;
  pen.globalAlpha = node.flags & MATCHES ? 1 : 0.16;
  if (size.names) {
    pen.fillStyle = ink.color;
    pen.font = nameFont();
    pen.fillText(node.name, x, y + size.cell - 3, nameWidth - 8);
    x += nameWidth;
  }
  const whole = node.faults.some(({ card }) => card < 0);
  for (let card = 0; card < node.cards; card += 1) {
    const faulty = whole || node.faults.some((fault) => fault.card === card);
    paintCell(pen, x + card * pitch, y, colours[faulty ? "fault" : node.colour], faulty || node.colour === "bad");
  }
}

// Shape tells as well as colour: what is broken carries a cross, where a cell has room for one.
function paintCell(pen, x, y, { fill, line }, broken) {
  pen.fillStyle = fill;
  pen.fillRect(x, y, size.cell, size.cell);
  if (size.cell < 6) return;
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, size.cell - 1, size.cell - 1);
  if (!broken) return;
  const inset = size.cell / 4;
  pen.beginPath();
  pen.moveTo(x + inset, y + inset);
  pen.lineTo(x + size.cell - inset, y + size.cell - inset);
  pen.moveTo(x + size.cell - inset, y + inset);
  pen.lineTo(x + inset, y + size.cell - inset);
  pen.lineWidth = 1.4;
  pen.stroke();
}

function show() {
  const pen = canvas.getContext("2d");
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(base, 0, 0);
  const box = cursor && boxOf(cursor);
  if (!box) return;
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.strokeStyle = getComputedStyle(document.querySelector(".brand .icon")).color;
  pen.lineWidth = 2;
  pen.strokeRect(box.x - 1.5, box.y - 1.5, size.cell + 3, size.cell + 3);
}

// --- Pointing ------------------------------------------------------------------------------------

function boxOf({ node, card }) {
  const pitch = size.cell + size.gap;
  const block = blocks.find(({ column }) => column[0] <= node && node <= column.at(-1));
  if (!block) return null;
  const x = block.x + nameWidth + Math.max(0, card) * pitch;
  return { x, y: block.y + (node - block.column[0]) * pitch, block };
}

function at(event) {
  const pitch = size.cell + size.gap;
  const frame = canvas.getBoundingClientRect();
  const x = event.clientX - frame.left;
  const y = event.clientY - frame.top;
  const block = blocks.find((one) =>
    x >= one.x && x < one.x + one.wide && y >= one.y && y < one.y + one.column.length * pitch);
  if (!block) return null;
  const node = block.column[Math.floor((y - block.y) / pitch)];
  const card = Math.floor((x - block.x - nameWidth) / pitch);
  return card < nodes[node].cards ? { node, card } : null;
}

function told({ node: index, card }) {
  const node = nodes[index];
  const codes = node.faults.filter((fault) => fault.card < 0 || fault.card === card).map(({ code }) => code);
  const elsewhere = node.faults.filter((fault) => fault.card >= 0 && fault.card !== card);
  return [
    card >= 0 && node.cards ? `${node.name} GPU ${card}` : node.name,
    node.flags & HEARD ? node.label : `${node.label}, unreachable`,
    ...new Set(codes),
    ...new Set(elsewhere.map((fault) => `${fault.code} on GPU ${fault.card}`)),
    node.flags & SPARE ? "spare" : "",
    node.flags & HELD ? "on hold" : "",
    node.job,
    `rack ${node.rack}`,
    node.flags & MATCHES ? "" : "left out by the filter",
  ].filter(Boolean).join(" · ");
}

function move(to) {
  cursor = to;
  show();
  read.textContent = to ? told(to) : advice;
}

function follow(event) {
  resting = event;
  const found = at(event);
  hint(event, found);
  if (found && (cursor?.node !== found.node || cursor?.card !== found.card)) move(found);
}

/** Tell beside the pointer what is below it. */
function hint(event, found) {
  canvas.style.cursor = found ? "pointer" : "default";
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = told(found);
  const frame = canvas.getBoundingClientRect();
  const x = event.clientX - frame.left;
  // Above the pointer in the lower half of what is seen, so that the frame need not grow for it.
  const seen = canvas.parentElement.getBoundingClientRect();
  const below = event.clientY < (seen.top + seen.bottom) / 2;
  const y = event.clientY - frame.top + canvas.offsetTop;
  tip.style.top = `${below ? y + 16 : y - tip.offsetHeight - 10}px`;
  tip.style.left = `${Math.max(0, Math.min(x + 12, frame.width - tip.offsetWidth))}px`;
}

function open(place) {
  location.href = canvas.dataset.node.replace("NAME", encodeURIComponent(nodes[place.node].name));
}

// Up and down go along the nodes, left and right along the cards and on into the next rack.
function step(key, { node, card }) {
  const here = blocks.findIndex(({ column }) => column[0] <= node && node <= column.at(-1));
  const row = node - blocks[here].column[0];
  const beside = (block, edge) => {
    if (!block) return { node, card };
    const next = block.column[Math.min(row, block.column.length - 1)];
    return { node: next, card: edge === "first" ? 0 : Math.max(0, nodes[next].cards - 1) };
  };
  const kept = (next) => ({ node: next, card: Math.min(card, Math.max(0, nodes[next].cards - 1)) });
  switch (key) {
    case "ArrowUp": return kept(Math.max(0, node - 1));
    case "ArrowDown": return kept(Math.min(nodes.length - 1, node + 1));
    case "ArrowLeft": return card > 0 ? { node, card: card - 1 } : beside(blocks[here - 1], "last");
    case "ArrowRight": return card < nodes[node].cards - 1 ? { node, card: card + 1 } : beside(blocks[here + 1], "first");
    case "Home": return { node: 0, card: 0 };
    case "End": return kept(nodes.length - 1);
    default: return null;
  }
}

canvas.addEventListener("pointermove", follow);
canvas.addEventListener("pointerleave", () => {
  resting = null;
  tip.hidden = true;
  if (document.activeElement !== canvas) move(null);
});
canvas.addEventListener("click", (event) => {
  const found = at(event);
  if (found) open(found);
});
canvas.addEventListener("focus", () => {
  if (nodes.length) move(present(cursor));
});
canvas.addEventListener("blur", () => move(null));
canvas.addEventListener("keydown", (event) => {
  if (!nodes.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const now = present(cursor);
  if (event.key === "Enter") return open(now);
  const next = step(event.key, now);
  if (!next) return;
  event.preventDefault();
  move(next);
  const frame = canvas.parentElement;
  const { y } = boxOf(next);
  if (y < frame.scrollTop + TITLE || y > frame.scrollTop + frame.clientHeight - 3 * TITLE) {
    frame.scrollTop = y - frame.clientHeight / 2;
  }
});

// The page's own poll says when anything changed here.
document.addEventListener("htmx:beforeOnLoad", ({ detail }) => {
  if (detail.elt?.id === "live-poll" && detail.xhr.status === 200) refresh();
});
new MutationObserver(paint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
let before = 0;
new ResizeObserver(() => {
  if (canvas.parentElement.clientWidth === before) return;
  before = canvas.parentElement.clientWidth;
  lay();
}).observe(canvas.parentElement);
refresh();
