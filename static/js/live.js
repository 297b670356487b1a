// Live regions: swaps only those whose content changed, keeps what the reader opened, typed,
// chose or focused, leaves those alone in which they press or select, and says since when the page
// is stale if the server does not answer.
"use strict";

(() => {
  const received = new Map(); // region id -> its content as the server last sent it
  const toggled = new Map(); // details key -> whether the reader wants it open
  const REFUSED = "[data-draft=refused]";
  const beacon = document.getElementById("beacon");
  // By the server's clock, as all times of the page.
  let shownAt = new Date(1000 * document.body.dataset.now); // nothing later is missing

  const isPoll = (event) => event.detail.elt?.id === "live-poll";
  const utc = (date) => date.toISOString().slice(11, 19);

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

  // What came back refused is before its reader's eyes, and stays so.
  for (const details of document.querySelectorAll(`details[data-key]:has(${REFUSED})`)) {
    toggled.set(details.dataset.key, true);
  }

  document.addEventListener("click", (event) => {
    const details = event.target.closest("summary")?.parentElement;
    if (details?.dataset.key) toggled.set(details.dataset.key, !details.open);
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
  });

  // --- What waits for the reader -----------------------------------------------------------------

  const pressed = new Map(); // id of each pointer that is down -> what it was pressed on

  document.addEventListener("pointerdown", ({ button, pointerId, target }) => {
    if (button === 0) pressed.set(pointerId, target);
  }, true);
  // Not every release is told: of a drag, into a menu or list of the browser's, in another window.
  for (const name of ["pointerup", "pointercancel", "pointermove"]) {
    document.addEventListener(name, ({ buttons, pointerId, type }) => {
      if (type !== "pointermove" || buttons === 0) pressed.delete(pointerId);
    }, true);
  }
  for (const name of ["contextmenu", "dragend"]) {
    document.addEventListener(name, () => pressed.clear(), true);
  }
  addEventListener("blur", () => pressed.clear());

  const held = new Set(); // ids of the regions whose news waits

  // A press whose target is replaced before the release is no click, and takes a selection with it.
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (!isPoll(event) && isPressedIn(event.detail.target)) event.detail.shouldSwap = false;
  });

  // Whoever has seen nothing is told all there is, so also what was left out.
  document.addEventListener("htmx:configRequest", (event) => {
    const { detail } = event;
    if (isPoll(event) && held.size) detail.path = detail.path.replace(/([?&]after=)[^&]*/, "$1");
  });

  function isPressedIn(region) {
    return [...pressed.values()].some((target) => region.contains(target));
  }

  // What is selected in a field is carried over: it counts as collapsed here.
  function isSelectedIn(region) {
    const selection = getSelection();
    return !selection.isCollapsed && selection.getRangeAt(0).intersectsNode(region);
  }

  document.addEventListener("htmx:oobBeforeSwap", (event) => {
    const { target, fragment } = event.detail;
    const fresh = fragment.firstElementChild;
    const news = newsOf(fresh.outerHTML);
    const isNew = received.get(target.id) !== news;
    const isHeld = isNew && (isPressedIn(target) || isSelectedIn(target));
    if (isHeld) held.add(target.id);
    else held.delete(target.id);
    if (isHeld || !isNew) {
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
    // A field or a list that the reader has not touched follows the server.
    for (const field of old.querySelectorAll("input[type=text][id], textarea[id]")) {
      const twin = fresh.querySelector(`#${CSS.escape(field.id)}`);
      const isTyped = field.value !== field.defaultValue || field.closest(REFUSED);
      if (twin && isTyped) twin.value = field.value;
    }
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
    const find = active && finderOf(active);
    const caret = active?.selectionStart != null ? [active.selectionStart, active.selectionEnd] : null;
    return (successor) => {
      if (!successor) return;
      [...successor.querySelectorAll(".scroll")].forEach((box, number) => {
        [box.scrollTop, box.scrollLeft] = scrolls[number] ?? [0, 0];
      });
      const heir = find?.(successor);
      if (!heir) return;
      heir.focus({ preventScroll: true });
      if (caret) heir.setSelectionRange(...caret);
    };
  }

  // How to find an element again in its region's successor: the same one in the same form, details
  // or part of the page, never one that only looks like it. What is not there any more is not found.
  function finderOf(element) {
    if (element.id) return (successor) => successor.querySelector(`#${CSS.escape(element.id)}`);
    const home = homeOf(element);
    const alike = alikeIn([home], element);
    return (successor) => {
      const homes = [successor, ...successor.querySelectorAll(HOMES)];
      const heirs = alikeIn(homes.filter((one) => nameOf(one) === nameOf(home)), element);
      return heirs.length === alike.length ? heirs[alike.indexOf(element)] : null;
    };
  }

  const HOMES = "form, [data-key], [id]";
  const homeOf = (element) => element.closest(HOMES);

  function nameOf(home) {
    if (home.tagName !== "FORM") return home.dataset.key ?? home.id;
    // Forms of a list may go to one address, and tell by a hidden field what they are about.
    const told = [...home.querySelectorAll("input[type=hidden]:not([name=csrfmiddlewaretoken])")];
    return [home.getAttribute("action"), ...told.map(({ name, value }) => `${name}=${value}`)].join(" ");
  }

  function alikeIn(homes, element) {
    return homes
      .flatMap((home) => [...home.querySelectorAll(element.tagName)].filter((one) => homeOf(one) === home))
      .filter((one) => looksOf(one) === looksOf(element));
  }

  function looksOf(element) {
    const looks = ["href", "name", "type", "formaction"].map((name) => element.getAttribute(name));
    // A button that says something else does something else.
    if (["BUTTON", "PRE"].includes(element.tagName)) looks.push(element.value, element.textContent);
    return JSON.stringify(looks);
  }

  // --- The beacon --------------------------------------------------------------------------------

  document.addEventListener("htmx:afterOnLoad", (event) => {
    const { requestConfig, xhr } = event.detail; // who asked has been replaced by now
    if (requestConfig.elt.id !== "live-poll" || xhr.status >= 400) return;
    if (!held.size) shownAt = new Date(xhr.getResponseHeader("Date"));
    if ([...held].some((id) => isSelectedIn(document.getElementById(id)))) {
      tell("held", "Waits for your selection");
      beacon.title = `Where you select nothing is shown that came after ${utc(shownAt)} UTC`;
    } else tell("live", "Live");
  });

  for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
    document.addEventListener(name, (event) => {
      if (isPoll(event)) tell("stale", `Stale since ${utc(shownAt)} UTC`);
      if (event.detail.elt?.id === "automation") forget(event.detail.elt);
    });
  }
  if (beacon && !document.getElementById("live-poll")) beacon.hidden = true;

  function tell(state, words) {
    if (!beacon || (beacon.dataset.live === state && state === "live")) return;
    beacon.dataset.live = state;
    beacon.title = "";
    const text = beacon.querySelector(".beacon-text");
    if (text.textContent !== words) text.textContent = words;
  }

  // What automation does is not known while nobody answers for it.
  function forget(automation) {
    automation.className = "automation automation--quiet";
    automation.removeAttribute("title");
    const sign = automation.querySelector("use");
    sign.setAttribute("href", sign.getAttribute("href").replace(/#.*/, "#quiet"));
    automation.lastChild.textContent = "Automation unknown";
  }
})();
