// The frame of all screens: header, keys, theme.

import { get, isStatic } from "./api.js";
import { h, replace, visible } from "./dom.js";
import * as state from "./state.js";
import { message } from "./ui.js";
import * as neighbors from "./neighbors.js";
import * as map from "./map.js";
import * as run from "./run.js";
import * as time from "./time.js";
import * as compare from "./compare.js";
import * as views from "./views.js";
import * as curate from "./curate.js";

const SCREENS = { neighbors, map, run, time, compare, views, curate };
const TITLES = {
  neighbors: "Neighbors", map: "Map", run: "Run", time: "Time", compare: "Compare", views: "Views", curate: "Curate",
};
const KEYS = [
  ["1 … 7", "switch the screen"],
  ["?", "show these keys"],
  ["/", "search for an image by name"],
  ["r", "a random image"],
  ["← → ↑ ↓", "move between images"],
  ["Enter", "make the focused neighbor the query"],
  ["Backspace", "back to the query before"],
  ["b", "Neighbors: browse all images"],
  ["l", "Map: lasso on or off (or hold Shift and drag)"],
  ["+  −  0", "Map and Time: zoom in, out, fit"],
  ["Space", "Time: play"],
  ["t", "light or dark"],
  ["Esc", "close, or clear the selection"],
];

const header = document.querySelector("header.top");
const main = document.getElementById("screen");
let current = null;
let app = null;

function theme(change) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  let chosen = null;
  try {
    chosen = localStorage.getItem("snclr-theme");
  } catch {
    // storage is not available from file://
  }
  if (change) {
    chosen = (document.documentElement.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("snclr-theme", chosen);
    } catch {
      // the choice lasts as long as the page
    }
  }
  if (chosen) document.documentElement.dataset.theme = chosen;
  window.dispatchEvent(new Event("themechange"));
}

function drawHeader(screen) {
  const step = (run) => (run.step === null ? null : `step ${run.step.toLocaleString("en-US")}`);
  const several = app.runs.length > 1; // the step of each is then beside its name
  const name = (run) => visible(run.title) + (several && step(run) ? ` (${step(run)})` : "");
  const runs = app.runs.map(name).join("  ·  ");
  const common = (key) => [...new Set(app.runs.map((run) => run[key]))].filter(Boolean).join(", ");
  const facts = [common("encoder"), common("method"), several ? null : step(app.runs[0])].filter(Boolean).join(" · ");
  replace(
    header,
    h(
      "div",
      { class: "bar" },
      h("a", { class: "brand", href: "#/neighbors", title: "snclr explore" }, h("span", { class: "mark", "aria-hidden": "true" }), "snclr"),
      h(
        "nav",
        { "aria-label": "Screens" },
        Object.entries(TITLES).map(([name, text], index) =>
          h("a", {
            href: `#/${name}`, text, "aria-current": name === screen ? "page" : undefined, title: `${text} (${index + 1})`,
            onclick: (event) => {
              event.preventDefault();
              open(name);
            },
          }),
        ),
      ),
      h("div", { class: "run", title: `${runs}: ${facts}` }, h("b", { text: runs }), h("small", { text: facts })),
      h("button", { type: "button", class: "icon", title: "Light or dark (t)", "aria-label": "Light or dark", text: "◐", onclick: () => theme(true) }),
      h("button", { type: "button", class: "icon", title: "Keys (?)", "aria-label": "Keys", text: "?", onclick: help }),
    ),
  );
}

// Keep the current image when the screen changes.
function open(screen) {
  const { params } = state.read();
  state.go(screen, params.img ? { img: params.img } : {});
}

function help() {
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    h("h2", { text: "Keys" }),
    h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", { text: key })), h("dd", { text })])),
    h("p", { class: "quiet", text: "The address of the page holds its state: copy it to come back to the same view." }),
    h("button", { type: "button", class: "primary", text: "Close", onclick: () => dialog.close() }),
  );
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

function show({ screen, params }) {
  const name = SCREENS[screen] ? screen : "neighbors";
  if (current?.name !== name) {
    current?.view.unmount?.();
    main.className = `screen-${name}`;
    replace(main);
    document.title = `${TITLES[name]} · ${app.runs[0].title} · snclr`;
    drawHeader(name);
    current = { name, view: SCREENS[name].mount(main, app) };
  }
  current.view.update(params);
}

document.addEventListener("keydown", (event) => {
  if (!app || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input:not([type=range]), textarea, select");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  const screens = Object.keys(TITLES);
  if (event.key >= "1" && event.key <= String(screens.length)) open(screens[Number(event.key) - 1]);
  else if (event.key === "?") help();
  else if (event.key === "t") theme(true);
  else if (event.key === "/") {
    if (!document.querySelector("input[type=search]")) state.go("neighbors", {});
    document.querySelector("input[type=search]")?.focus();
  } else if (current.view.key?.(event)) {
    // the screen has handled it
  } else if (event.key === "r") {
    const id = Math.floor(Math.random() * app.sets[0].count);
    state.set({ img: `images:${id}`, trail: undefined });
  } else return;
  event.preventDefault();
});

theme(false);
get("state")
  .then((loaded) => {
    app = { ...loaded, static: isStatic };
    state.onChange(show);
    show(state.read());
  })
  .catch((error) => replace(main, message(error.message, "error")));
