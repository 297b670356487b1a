// Live regions: swaps only those whose content changed, keeps what the reader opened, typed,
// chose or focused, and says since when the page is stale if the server does not answer.
"use strict";

(() => {
  const received = new Map(); // region id -> its content as the server last sent it
  const toggled = new Map(); // details key -> whether the reader wants it open
  const beacon = document.getElementById("beacon");
  let heardAt = new Date();

  // Every answer differs in its CSRF mask and its relative times: neither is news.
  const newsOf = (html) =>
    html
      .replace(/name="csrfmiddlewaretoken" value="[^"]*"/g, "")
      .replace(/(<time[^>]* data-tick=[^>]*>)[^<]*/g, "$1")
      .replace(/ hx-swap-oob="true"/g, "")
      .replace(/\s+/g, " ");

  // What answers an order is a page at the order's address, where nothing can be looked at:
  // reloading it, signing in again or handing the address on must lead to the page itself.
  const { address } = document.body.dataset;
  if (address) history.replaceState(history.state, "", address);

  for (const region of document.querySelectorAll("[data-region]")) {
    received.set(region.id, newsOf(region.outerHTML));
  }

  document.addEventListener("click", (event) => {
    const details = event.target.closest("summary")?.parentElement;
    if (details?.dataset.key) toggled.set(details.dataset.key, !details.open);
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
  });

  document.addEventListener("htmx:oobBeforeSwap", (event) => {
    const { target, fragment } = event.detail;
    const fresh = fragment.firstElementChild;
    const news = newsOf(fresh.outerHTML);
    if (received.get(target.id) === news) {
      event.detail.shouldSwap = false;
      return;
    }
    received.set(target.id, news);
    carryOver(target, fresh);
    const restore = placeOf(target);
    queueMicrotask(() => restore(document.getElementById(target.id)));
  });

  function carryOver(old, fresh) {
    for (const details of fresh.querySelectorAll("details[data-key]")) {
      const wanted = toggled.get(details.dataset.key);
      if (wanted !== undefined) details.open = wanted;
    }
    for (const field of old.querySelectorAll("input[type=text][id], textarea[id]")) {
      const twin = fresh.querySelector(`#${CSS.escape(field.id)}`);
      if (twin) twin.value = field.value;
    }
    // A list that the reader has not touched follows the server.
    for (const list of old.querySelectorAll("select[id]")) {
      const given = [...list.options].find((one) => one.defaultSelected) ?? list.options[0];
      const twin = fresh.querySelector(`#${CSS.escape(list.id)}`);
      const offered = [...(twin?.options ?? [])].some((one) => one.value === list.value);
      if (offered && list.value !== given?.value) twin.value = list.value;
    }
  }

  // Where the reader is inside a region, as a function that brings them back there in its successor.
  function placeOf(region) {
    const scrolls = [...region.querySelectorAll(".scroll")].map((box) => [box.scrollTop, box.scrollLeft]);
    const active = region.contains(document.activeElement) ? document.activeElement : null;
    const selector = active && selectorOf(active);
    const caret = active && "selectionStart" in active ? [active.selectionStart, active.selectionEnd] : null;
    return (successor) => {
      if (!successor) return;
      [...successor.querySelectorAll(".scroll")].forEach((box, number) => {
        [box.scrollTop, box.scrollLeft] = scrolls[number] ?? [0, 0];
      });
      const heir = selector && successor.querySelector(selector);
      if (!heir) return;
      heir.focus({ preventScroll: true });
      if (caret) heir.setSelectionRange(...caret);
    };
  }

  function selectorOf(element) {
    if (element.id) return `#${CSS.escape(element.id)}`;
    const key = element.parentElement?.dataset.key;
    if (element.tagName === "SUMMARY" && key) return `[data-key="${CSS.escape(key)}"] > summary`;
    const href = element.getAttribute("href");
    if (href) return `a[href="${CSS.escape(href)}"]`;
    const testid = element.dataset.testid;
    return testid ? `[data-testid="${CSS.escape(testid)}"]` : null;
  }

  // --- The beacon --------------------------------------------------------------------------------

  const isPoll = (event) => event.detail.elt?.id === "live-poll";

  document.addEventListener("htmx:beforeOnLoad", (event) => {
    if (!isPoll(event) || event.detail.xhr.status >= 400) return;
    heardAt = new Date();
    tell("live", "Live");
  });
  for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
    document.addEventListener(name, (event) => {
      if (isPoll(event)) tell("stale", `Stale since ${heardAt.toISOString().slice(11, 19)} UTC`);
    });
  }
  if (beacon && !document.getElementById("live-poll")) beacon.hidden = true;

  function tell(state, words) {
    if (!beacon || (beacon.dataset.live === state && state === "live")) return;
    beacon.dataset.live = state;
    const text = beacon.querySelector(".beacon-text");
    if (text.textContent !== words) text.textContent = words;
  }
})();
