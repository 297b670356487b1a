// Light or dark: what the person chose here, else what their system prefers.
// Runs before the first paint, so it stands in the head and does little.
"use strict";

(() => {
  const root = document.documentElement;
  const KEY = "drydock.theme";

  const chosen = localStorage.getItem(KEY);
  if (chosen) root.dataset.theme = chosen;

  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
  });
})();
