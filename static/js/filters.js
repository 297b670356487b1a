// Filters that stand in the address: what is chosen is applied at once, what is empty stays out.
"use strict";

(() => {
  for (const form of document.querySelectorAll("form[data-filters]")) {
    form.addEventListener("change", (event) => {
      if (event.target.tagName === "SELECT") form.requestSubmit();
    });
    form.addEventListener("submit", () => {
      for (const field of form.elements) if (field.name && !field.value) field.disabled = true;
    });
  }
  // Back in history, the browser restores the page as it was left.
  addEventListener("pageshow", () => {
    for (const field of document.querySelectorAll("form[data-filters] :disabled")) field.disabled = false;
  });
})();
