// What the charts and the map share: asking the server, making elements, and telling numbers and
// times.

const NS = "http://www.w3.org/2000/svg";
const PATIENCE_MS = 30_000; // an answer that never comes must not keep the next from being asked for
export const DAY_S = 86400;
const TICK_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200,
  DAY_S, 2 * DAY_S, 7 * DAY_S, 30 * DAY_S,
];

export const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
export const day = (at) => new Date(at * 1000).toISOString().slice(0, 10);

/** Seconds between round times, so that at most about `count` of them lie in a span. */
export function tickStep(span, count) {
  const longest = TICK_S.at(-1);
  return TICK_S.find((seconds) => span / seconds <= count) ?? Math.ceil(span / count / longest) * longest;
}

/** Whether the server answered, and its news where it had any. */
export async function ask(url) {
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch(url, { credentials: "same-origin", signal });
    const heard = answer.ok && !answer.redirected;
    return { heard, news: heard && answer.status === 200 ? await answer.json() : null };
  } catch {
    return { heard: false, news: null };
  }
}

/**
 * Calls `update` now, `ms` after each call is over, and at once when a hidden page is looked at again.
 * It is not called while the page is hidden. With `once` no more after one that returned true.
 */
export function keepAsking(update, ms, { once = false } = {}) {
  let timer = 0;
  let isAsking = false;

  async function poll() {
    if (isAsking) return; // it goes on by itself
    clearTimeout(timer);
    isAsking = true;
    let heard = false;
    try {
      if (!document.hidden) heard = await update();
    } finally {
      isAsking = false;
      if (once && heard) document.removeEventListener("visibilitychange", poll);
      else timer = setTimeout(poll, ms);
    }
  }

  document.addEventListener("visibilitychange", poll);
  poll();
}

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
