// Keeps relative times ticking, in the same words and by the same clock as the server's, and marks
// what is overdue.
"use strict";

(() => {
  const pad = (value) => String(value).padStart(2, "0");

  function coarse(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min`;
    if (whole < 2 * 86400) {
      return `${Math.floor(whole / 3600)} h ${pad(Math.floor((whole % 3600) / 60))} min`;
    }
    return `${Math.floor(whole / 86400)} d`;
  }

  // The moments are the server's, and the two clocks may differ by minutes.
  const APART_MS = 2000; // what a header in whole seconds and its way here may amount to
  let ahead = 0; // by how much the server's clock is

  function hear(serversNow) {
    const told = serversNow - Date.now();
    if (Math.abs(told - ahead) > APART_MS) ahead = told;
  }

  hear(1000 * document.body.dataset.now);
  document.addEventListener("htmx:beforeOnLoad", ({ detail }) => {
    hear(Date.parse(detail.xhr.getResponseHeader("Date")));
  });

  function tick() {
    const now = Date.now() + ahead;
    for (const time of document.querySelectorAll("time[data-tick]")) {
      const age = coarse((now - Date.parse(time.dateTime)) / 1000);
      const text = time.dataset.tick === "ago" ? `${age} ago` : age;
      if (time.textContent !== text) time.textContent = text;
      const watched = time.closest("[data-late]");
      if (watched) {
        const late = (now - Date.parse(time.dateTime)) / 1000 > Number(watched.dataset.late);
        watched.toggleAttribute("data-is-late", late);
      }
    }
  }

  tick();
  setInterval(tick, 1000);
  document.addEventListener("htmx:afterSettle", tick);
})();
