// What a refresh must not take away: a form that came back refused, and a long text that somebody
// types in here, with all that goes with it, such as the digest of what the text was made from. A
// text that nobody has typed in follows the server. Runs after live.js, which carries over fields.
"use strict";

document.addEventListener("htmx:oobBeforeSwap", (event) => {
  const { target, fragment, shouldSwap } = event.detail;
  if (!shouldSwap) return;
  for (const old of target.querySelectorAll("[data-draft]")) {
    const twin = fragment.querySelector(`[data-key="${CSS.escape(old.dataset.key)}"]`);
    if (!twin) continue;
    const texts = [...old.querySelectorAll("textarea")];
    const isTyped = texts.some((text) => text.value !== text.defaultValue);
    if (isTyped || old.dataset.draft === "refused") {
      twin.replaceWith(old);
    } else {
      for (const text of twin.querySelectorAll("textarea")) text.value = text.defaultValue;
    }
  }
});
