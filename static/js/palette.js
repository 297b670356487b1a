// The command palette: pages, what can be done here, and whatever the server finds. It only leads
// to a page, a form or a button: nothing is done to the fleet from here.
"use strict";

(() => {
  const dialog = document.getElementById("palette");
  if (!dialog) return;
  const field = document.getElementById("palette-text");
  const list = document.getElementById("palette-list");
  const here = document.getElementById("palette-here");
  const found = document.getElementById("palette-found");
  const status = document.getElementById("palette-status");
  const PAUSE_MS = 120; // of typing, before the server is asked

  // What the open page offers: where it stands there, and in which words it is told here.
  const OFFERS = [
    {
      at: "#order-reason",
      words: () => `Give the reason: ${document.querySelector(".order-title strong").textContent}`,
    },
    {
      at: "#node-orders .orders a",
      words: (link) => `${link.dataset.words}…`,
      verb: (link) => link.textContent,
      note: (link) => link.title,
    },
    { at: "#incident-head a[href^='#']", words: () => "Read the plan that waits for approval" },
    { at: "form[action$='/acknowledge'] button", words: () => "Acknowledge this incident" },
    { at: "[id^='run-reason']", words: () => "Try the step again, or cancel the playbook" },
    { at: "#resolve-reason", words: () => "Resolve this incident by hand" },
    { at: "#note", words: () => "Write a note for whoever is next" },
  ];

  let chosen = null; // the option that Enter opens
  let moved = false; // whether the person chose it, not we
  let answered = ""; // the text that the shown finds are for
  let asking = null; // aborts the question under way
  let timer = 0;
  let named = 0; // options that were given an id
  let enterWaits = false; // Enter was pressed before the answer came
  let comesBack = () => {};

  // --- Opening and closing -------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    if (event.target.closest("#palette-open")) open();
  });

  function open() {
    comesBack = wayBack();
    offer();
    field.value = "";
    answered = "";
    found.replaceChildren();
    dialog.showModal();
    field.focus();
    show();
  }

  // The browser returns the focus itself, unless a live update has replaced what had it meanwhile.
  function wayBack() {
    const was = document.activeElement;
    const href = was.getAttribute("href");
    const selector = was.id ? `#${CSS.escape(was.id)}` : href && `a[href="${CSS.escape(href)}"]`;
    return () => {
      if (!was.isConnected && selector) document.querySelector(selector)?.focus({ preventScroll: true });
    };
  }

  dialog.addEventListener("close", () => {
    stopAsking();
    const now = document.activeElement;
    if (now === document.body || dialog.contains(now)) comesBack();
  });

  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // its backdrop: the dialog itself has no padding
  });

  // --- What there is to choose from ----------------------------------------------------------------

  function offer() {
    const options = OFFERS.flatMap(({ at, words, verb, note }) =>
      [...document.querySelectorAll(at)].map((element) => {
        const option = document.createElement(element.href ? "a" : "button");
        if (element.href) option.href = element.href;
        else Object.assign(option, { type: "button" }).dataset.at = at;
        option.className = "option";
        option.tabIndex = -1;
        option.setAttribute("role", "option");
        option.append(span("option-words", words(element)));
        if (verb) option.dataset.verb = verb(element);
        if (note) option.append(span("option-note", note(element)));
        return option;
      }),
    );
    here.replaceChildren(here.firstElementChild, ...options);
  }

  function span(className, text) {
    return Object.assign(document.createElement("span"), { className, textContent: text });
  }

  // Hides what does not fit the words so far, and sees to it that something is chosen.
  function show() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of list.querySelectorAll("[data-local]")) {
      const options = [...group.querySelectorAll("[role=option]")];
      for (const option of options) {
        const { verb, also = "" } = option.dataset;
        const told = `${option.querySelector(".option-words").textContent} ${also}`;
        // Whoever types the name of a node looks for the node, not for all that can be done to it.
        const isMeant = !verb || !words.length || words.some((word) => has(verb, word));
        option.hidden = !isMeant || !words.every((word) => has(told, word));
      }
      group.hidden = options.every((option) => option.hidden);
    }
    const options = shown();
    if (!moved || !options.includes(chosen)) choose(options[0] ?? null);
    tell(options.length);
  }

  function has(told, word) {
    return ` ${told.toLowerCase()}`.includes(` ${word}`);
  }

  function shown() {
    return [...list.querySelectorAll("[role=option]")].filter((option) => option.checkVisibility());
  }

  function tell(count) {
    const text = field.value.trim();
    status.classList.toggle("sr", count > 0);
    if (count > 0) status.textContent = `${count} ${count === 1 ? "result" : "results"}`;
    else if (text !== answered) status.textContent = "Looking…";
    else status.textContent = `Nothing that you may see fits “${text}”.`;
  }

  function choose(option) {
    chosen?.setAttribute("aria-selected", "false");
    chosen = option;
    if (!option) return field.removeAttribute("aria-activedescendant");
    option.id ||= `palette-option-${++named}`;
    option.setAttribute("aria-selected", "true");
    field.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  }

  // --- Asking the server ---------------------------------------------------------------------------

  field.addEventListener("input", () => {
    stopAsking();
    moved = false;
    const text = field.value.trim();
    if (text) timer = setTimeout(ask, PAUSE_MS, text);
    else answer("", "");
    show();
  });

  function stopAsking() {
    clearTimeout(timer);
    asking?.abort();
    enterWaits = false;
  }

  async function ask(text) {
    asking = new AbortController();
    const { signal } = asking;
    try {
      const response = await fetch(`${field.dataset.url}?${new URLSearchParams({ q: text })}`, { signal });
      if (response.redirected) return location.reload(); // signed out meanwhile
      if (!response.ok) throw new Error(`the search answered ${response.status}`);
      answer(text, await response.text());
    } catch (error) {
      if (signal.aborted) return;
      enterWaits = false;
      status.classList.remove("sr");
      status.textContent = "The search does not answer. Type on to try again.";
    }
  }

  function answer(text, html) {
    answered = text;
    found.innerHTML = html;
    show();
    if (enterWaits && chosen) chosen.click();
    enterWaits = false;
  }

  // --- Choosing ------------------------------------------------------------------------------------

  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) {
      const options = shown();
      choose(options.at((options.indexOf(chosen) + by) % options.length) ?? null);
      moved = true;
    } else if (event.key === "Enter") {
      // What was found for fewer letters is not what is meant now.
      const old = field.value.trim() !== answered && (!chosen || found.contains(chosen));
      if (old && !moved) enterWaits = true;
      else chosen?.click();
    } else return;
    event.preventDefault();
  });

  list.addEventListener("pointermove", (event) => {
    const option = event.target.closest("[role=option]");
    if (!option || option === chosen) return;
    choose(option);
    moved = true;
  });

  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (!option || event.ctrlKey || event.metaKey || event.shiftKey) return;
    dialog.close();
    if (option.dataset.press) document.getElementById(option.dataset.press).click();
    if (option.dataset.at) leadTo(document.querySelector(option.dataset.at));
  });

  function leadTo(element) {
    if (!element) return; // a live update has taken it away: it is done already
    const details = element.closest("details:not([open])");
    if (details) details.querySelector("summary").click(); // so that live.js knows of it
    element.focus({ preventScroll: true });
    element.scrollIntoView({ block: "center" });
  }
})();
