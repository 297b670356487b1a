// Keeps relative times ticking, in the same words as the server's, and marks what is overdue.
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

  function tick() {
    const now = Date.now();
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
