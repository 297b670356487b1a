// Keys: one table says what each does; the handler and the help read it. They rest while somebody
// types, while a dialog is open, and leave the browser's own combinations alone.
"use strict";

(() => {
  const help = document.getElementById("keys");
  if (!help) return;
  const SEQUENCE_MS = 1500; // between the keys of one such as `g o`
  const MOD = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
  const ROWS =
    "main .needs > .need, main .table:not(.table--tight) > tbody > tr, #incident-runs .step";

  // `keys` are handled here, `native` by the browser. A space parts the keys of a sequence.
  const BINDINGS = [
    { group: "Everywhere", keys: ["/", "Mod+k"], words: "Search and commands", run: press("palette-open") },
    { group: "Everywhere", keys: ["?"], words: "These keys", run: press("keys-open") },
    { group: "Everywhere", keys: [], native: ["Esc"], words: "Close what is open", run: null },
    { group: "Rows of a page", keys: ["j"], words: "Next row", run: () => step(1) },
    { group: "Rows of a page", keys: ["k"], words: "Previous row", run: () => step(-1) },
    { group: "Rows of a page", keys: ["o"], native: ["Enter"], words: "Open the row", run: openRow },
    ...[...document.querySelectorAll("#palette [data-go]")].map((page) => ({
      group: "Go to",
      keys: [`g ${page.dataset.go}`],
      words: page.querySelector(".option-words").textContent,
      run: () => page.click(),
    })),
  ];

  // --- The handler ---------------------------------------------------------------------------------

  let begun = null; // the first key of a sequence, and when it was pressed

  document.addEventListener("keydown", (event) => {
    if (["Shift", "Control", "Alt", "Meta"].includes(event.key)) return;
    if (event.defaultPrevented || isTyping(event) || document.querySelector("dialog[open]")) return;
    const key = nameOf(event);
    const pressed = begun && event.timeStamp - begun.at < SEQUENCE_MS ? `${begun.key} ${key}` : key;
    const isBeginning = BINDINGS.some(({ keys }) => keys.some((one) => one.startsWith(`${pressed} `)));
    begun = isBeginning ? { key: pressed, at: event.timeStamp } : null;
    const binding = BINDINGS.find(({ keys }) => keys.includes(pressed));
    if (!binding) return;
    event.preventDefault();
    binding.run();
  });

  function isTyping({ isComposing, target }) {
    return isComposing || target.isContentEditable || target.closest("input, textarea, select");
  }

  function nameOf(event) {
    if (event.altKey) return `Alt+${event.key}`;
    return event.ctrlKey || event.metaKey ? `Mod+${event.key}` : event.key;
  }

  function press(id) {
    return () => document.getElementById(id).click();
  }

  // --- Rows ----------------------------------------------------------------------------------------

  let place = -1; // of the row that was last moved to, should a live update take it away

  function step(by) {
    const rows = [...document.querySelectorAll(ROWS)].filter((row) => row.checkVisibility() && linkOf(row));
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const next = at >= 0 ? at + by : by > 0 ? Math.max(0, place) : place - 1;
    place = Math.max(0, Math.min(rows.length - 1, next));
    linkOf(rows[place]).focus({ preventScroll: true });
    rows[place].scrollIntoView({ block: "nearest" });
  }

  function openRow() {
    const row = document.activeElement.closest(ROWS);
    if (row) linkOf(row).click();
  }

  // What a row is about. A link that begins with `?` only narrows the list that it stands in.
  function linkOf(row) {
    if (row.matches(".step")) return row.querySelector("summary");
    const links = [...row.querySelectorAll("a[href]")];
    return links.find((link) => !link.getAttribute("href").startsWith("?")) ?? links[0];
  }

  // --- The help ------------------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    if (!event.target.closest("#keys-open")) return;
    document.querySelector("dialog[open]")?.close();
    document.getElementById("keys-list").replaceChildren(...groups());
    help.showModal();
  });

  help.addEventListener("click", (event) => {
    if (event.target === help) help.close(); // its backdrop: the dialog itself has no padding
  });

  function groups() {
    return [...new Set(BINDINGS.map(({ group }) => group))].map((group) => {
      const section = document.createElement("section");
      const facts = make("dl", BINDINGS.filter((one) => one.group === group).map(row));
      section.append(make("h3", [group]), facts);
      return section;
    });
  }

  function row({ keys, native = [], words }) {
    const ways = [...keys, ...native].map((way, number) => {
      const caps = way.split(/[ +]/).map((key) => make("kbd", [key === "Mod" ? MOD : key]));
      return make("span", [number ? " or " : "", ...caps]);
    });
    return make("div", [make("dt", ways), make("dd", [words])]);
  }

  function make(tag, children) {
    const element = document.createElement(tag);
    element.append(...children);
    return element;
  }
})();
