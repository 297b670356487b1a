// What must not be lost: a form that came back refused, and a long text that somebody types here,
// with all that goes with it, such as the digest of what the text was made from. Neither a refresh
// nor another page takes them away. A text that nobody has typed in follows the server. Runs after
// live.js, which carries over fields and corrects the address.
"use strict";

(() => {
  const isTyped = (text) => text.value !== text.defaultValue;

  document.addEventListener("htmx:oobBeforeSwap", (event) => {
    const { target, fragment, shouldSwap } = event.detail;
    if (!shouldSwap) return;
    for (const old of target.querySelectorAll("[data-key][data-draft]")) {
      const twin = fragment.querySelector(`[data-key="${CSS.escape(old.dataset.key)}"]`);
      const texts = [...old.querySelectorAll("textarea")];
      const isKept = old.dataset.draft === "refused" || texts.some(isTyped);
      if (twin && isKept) twin.replaceWith(old);
    }
  });

  // --- Another page ------------------------------------------------------------------------------

  // Kept in this tab, for nobody but who typed it: the next to sign in here may be somebody else.
  const user = document.querySelector("[data-user]")?.dataset.user;
  if (!user) return;
  const PREFIX = "drydock.draft";
  const own = `${PREFIX} ${user} `;
  const keyOf = (text) => `${own}${location.pathname} ${text.id}`;
  const TEXTS = "textarea[data-saved]";

  for (const key of Object.keys(sessionStorage)) {
    if (key.startsWith(PREFIX) && !key.startsWith(own)) sessionStorage.removeItem(key);
  }
  for (const text of document.querySelectorAll(TEXTS)) {
    putBack(text);
    keep(text);
  }
  document.addEventListener("input", ({ target }) => {
    if (target.matches(TEXTS)) keep(target);
  });

  function putBack(text) {
    const draft = JSON.parse(sessionStorage.getItem(keyOf(text)));
    if (!draft || isSaved(text, draft[text.name])) return;
    for (const [name, value] of Object.entries(draft)) {
      Object.assign(text.form.elements[name] ?? {}, { value });
    }
    const details = text.closest("details");
    if (details) details.open = true;
    mark(text);
  }

  // What stands there is not what the server has; who does not want it any more gets that.
  function mark(text) {
    const words = document.createElement("p");
    words.className = "quiet small";
    words.append("Typed here before, and not saved. ");
    const discard = document.createElement("button");
    Object.assign(discard, { type: "button", className: "button", textContent: "Discard" });
    discard.addEventListener("click", () => {
      sessionStorage.removeItem(keyOf(text));
      location.replace(location.pathname + location.search);
    });
    words.append(discard);
    text.before(words);
  }

  // That it was sent does not say that it arrived. What the page shows as saved has.
  function isSaved(text, typed) {
    const saved = [...document.querySelectorAll(text.dataset.saved)];
    return saved.some(({ textContent }) => textContent.trim() === typed.trim());
  }

  function keep(text) {
    if (isTyped(text) || text.closest("[data-draft=refused]")) {
      sessionStorage.setItem(keyOf(text), JSON.stringify(draftOf(text.form)));
    } else sessionStorage.removeItem(keyOf(text));
  }

  // All that the form would send, but what belongs to the session.
  function draftOf({ elements }) {
    const fields = [...elements].filter(({ name }) => name && name !== "csrfmiddlewaretoken");
    return Object.fromEntries(fields.map(({ name, value }) => [name, value]));
  }
})();
