// What the charts share: making elements, and telling numbers and times.

const NS = "http://www.w3.org/2000/svg";
export const TICK_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

export const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);

export const figure = (value) =>
  value == null ? "–"
    : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", "\u202f")
    : Number.isInteger(value) ? String(value)
    : value.toPrecision(4);

export function element(name, attributes, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Round values between two bounds, about `count` of them. */
export function ticksOf(low, high, count) {
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough) * unit;
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) ticks.push(value);
  return { step, unit, ticks };
}
