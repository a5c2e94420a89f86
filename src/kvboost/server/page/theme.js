// Light, dark, or as the system has it; remembered in this browser.
// Runs before the page is painted, so that it never shows in the wrong colours first.
"use strict";

(() => {
  const NAME = "kvboost.theme";
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function remembered() {
    try {
      const theme = localStorage.getItem(NAME);
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  }

  function use(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  }

  function next() {
    const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    use(theme);
    try {
      localStorage.setItem(NAME, theme);
    } catch {
      // it holds until the page is left
    }
  }

  use(remembered());
  document.addEventListener("DOMContentLoaded", () => {
    use(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", next);
  });
})();
