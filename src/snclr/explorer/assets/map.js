// Map: a 2-D layout of all images, what to color it by, and where it is wrong.

import { floats, get, post } from "./api.js";
import { categorical, continuous, hue, rampCss } from "./colors.js";
import { count, h, number, percent, replace, shortName, visible } from "./dom.js";
import { Scatter } from "./scatter.js";
import * as state from "./state.js";
import { classEdge, download, load, message, segmented, select, tile, toast } from "./ui.js";

const HELP = {
  class: "the label of each image",
  cluster: "k-means clusters of the encoder's features",
  purity: "share of the 20 nearest images that have the same class",
  reciprocity: "share of the 20 nearest images that have this one among theirs; needs no labels",
  hubness: "how many images have this one among their 20 nearest",
  loss: "SNCLR loss of the image among all others (center crop as both views)",
  change: "share of the 15 nearest that are new since the kept checkpoint before",
  kept: "share of the 15 true neighbors that are also among the 15 nearest on the map",
};
const WHOLE = ["class", "cluster"];

export function mount(root, app) {
  const stage = h("div", { class: "stage" });
  const panel = h("div", { class: "panel map-panel" });
  const inspector = h("aside", { class: "inspector" });
  const tip = h("div", { class: "tip", hidden: true });
  const hint = h("div", { class: "map-status" });
  root.append(h("div", { class: "map-area" }, stage, panel, tip, hint), inspector);
  const abort = new AbortController();
  let placing = new AbortController();
  let coloring = new AbortController();
  let scatter = null;
  let info = null;
  let ids = null;
  let values = null;
  let shown = { layout: "", mode: "", img: "" };
  let selection = [];
  let hidden = new Set();
  let hovered = -1;

  const imageOf = (row) => ({ set: "images", id: ids[row] });
  const runName = () => state.read().params.run ?? "a";

  async function start() {
    await load(hint, (options) => get("map", { run: runName() }, options), (loaded) => (info = loaded), abort.signal);
    if (!info) return;
    ids = await floats("map/ids", { run: runName() });
    replace(hint);
    try {
      scatter = new Scatter(stage, { imageOf, onHover: hover, onSelect: (row) => select_(row), onLasso: lassoed, inset: () => (innerWidth > 900 ? 270 : 0) });
    } catch (error) {
      replace(hint, message(error.message, "error"));
      return;
    }
    root.scatter = scatter; // for tests and benchmarks
    update(state.read().params);
  }

  function update(params) {
    if (!scatter) return;
    const layout = info.layouts.includes(params.layout) ? params.layout : "pca";
    const modes = info.modes.map((mode) => mode.name);
    const mode = modes.includes(params.color) ? params.color : modes[0];
    if (layout !== shown.layout) showLayout(layout);
    if (mode !== shown.mode || (mode === "kept" && layout !== shown.layout)) showMode(mode, layout);
    const image = state.parseRef(params.img);
    const row = image?.set === "images" ? ids.indexOf(image.id) : -1;
    shown = { layout, mode, img: params.img ?? "" };
    drawPanel();
    focus(row);
  }

  function showLayout(layout) {
    placing.abort();
    placing = new AbortController();
    load(hint, (options) => floats("map/points", { layout, run: runName() }, options), (points) => {
      replace(hint);
      scatter.setPoints(points, { animate: Boolean(scatter.points) });
      if (shown.img) focus(ids.indexOf(state.parseRef(shown.img)?.id ?? -1));
      fidelity(layout);
    }, placing.signal);
  }

  async function fidelity(layout) {
    const place = panel.querySelector(".fidelity");
    if (!place) return;
    await load(place, (options) => get("map/fidelity", { layout, run: runName() }, options), (found) => {
      replace(
        place,
        h("div", { class: "meter wide" }, h("i", { style: { width: `${100 * found.kept}%` } })),
        h("p", {}, h("b", { text: percent(found.kept) }), ` of the ${found.k} true neighbors of an image are near it on this map.`),
        h("p", { class: "quiet", text: `Trustworthiness ${number(found.trustworthiness, 2)} on ${count(found.sample)} images. ${found.description}.` }),
      );
    }, placing.signal);
  }

  function showMode(mode, layout) {
    coloring.abort();
    coloring = new AbortController();
    hidden = new Set();
    const legend = () => panel.querySelector(".legend") ?? h("div");
    load({ replaceChildren: (...children) => legend().replaceChildren(...children) }, (options) => floats("map/values", { mode, run: runName(), layout: mode === "kept" ? layout : undefined }, options), (loaded) => {
      values = loaded;
      paint(mode);
    }, coloring.signal);
  }

  function paint(mode) {
    const legend = panel.querySelector(".legend");
    if (WHOLE.includes(mode)) {
      scatter.setColors(categorical(values, hidden));
      const sizes = new Map();
      for (const value of values) if (!Number.isNaN(value)) sizes.set(value, (sizes.get(value) ?? 0) + 1);
      const names = [...sizes.keys()].sort((a, b) => a - b);
      replace(
        legend,
        h("div", { class: "names" }, names.slice(0, 40).map((value) => {
          const name = mode === "class" ? visible(app.sets[0].classes[value]) : `cluster ${value + 1}`;
          return h("button", {
            type: "button", class: hidden.has(value) ? "off" : "", "aria-pressed": String(!hidden.has(value)), title: "Click to fade, double-click to show alone",
            onclick: () => { hidden.has(value) ? hidden.delete(value) : hidden.add(value); paint(mode); },
            ondblclick: () => { hidden = new Set(names.filter((each) => each !== value)); paint(mode); },
          }, h("i", { style: { background: hue(value) } }), h("span", { text: name }), h("small", { text: count(sizes.get(value)) }));
        })),
        hidden.size ? h("button", { type: "button", class: "link", text: "Show all", onclick: () => { hidden.clear(); paint(mode); } }) : null,
      );
    } else {
      const { colors, low, high } = continuous(values);
      scatter.setColors(colors);
      const digits = high - low > 20 ? 0 : 2;
      replace(legend, h("div", { class: "ramp", style: { backgroundImage: rampCss() } }), h("div", { class: "ends" }, h("span", { text: number(low, digits) }), h("span", { text: number(high, digits) })));
    }
  }

  function drawPanel() {
    if (panel.childElementCount && panel.dataset.state === `${shown.layout}/${shown.mode}`) return;
    panel.dataset.state = `${shown.layout}/${shown.mode}`;
    const legend = panel.querySelector(".legend") ?? h("div", { class: "legend" });
    const faithful = panel.querySelector(".fidelity") ?? h("div", { class: "fidelity" });
    replace(
      panel,
      h(
        "details",
        { open: panel.querySelector("details") ? panel.querySelector("details").open : innerWidth > 700 },
        h("summary", { text: "Map" }),
        app.runs.length > 1 ? select("Run", app.runs.map((each) => [each.name, shortName(each.title)]), runName(), (value) => { state.set({ run: value === "a" ? undefined : value }); location.reload(); }) : null,
        h("div", { class: "field" }, h("span", { text: "Layout" }), segmented("Layout", [["pca", "PCA"], ...(info.layouts.includes("umap") ? [["umap", "UMAP"]] : [])], shown.layout, (value) => state.set({ layout: value === "pca" ? undefined : value }, { replace: true }))),
        info.layouts.includes("umap") ? null : h("p", { class: "quiet", text: "UMAP: pip install 'snclr[explore]'" }),
        select("Color", info.modes.map((mode) => [mode.name, mode.title]), shown.mode, (value) => state.set({ color: value }, { replace: true })),
        h("p", { class: "quiet", text: HELP[shown.mode] }),
        legend,
        h("h3", { text: "Where the map is wrong" }),
        faithful,
        h("div", { class: "tools" },
          h("button", { type: "button", class: "lasso-button", "aria-pressed": String(scatter.lassoMode), text: "Lasso", title: "Lasso (l), or hold Shift and drag", onclick: toggleLasso }),
          h("button", { type: "button", text: "Fit", title: "Fit (0)", onclick: () => scatter.fit() })),
      ),
    );
  }

  function toggleLasso() {
    scatter.lassoMode = !scatter.lassoMode;
    stage.classList.toggle("lassoing", scatter.lassoMode);
    panel.querySelector(".lasso-button").setAttribute("aria-pressed", String(scatter.lassoMode));
  }

  async function hover(row, at) {
    if (row === hovered) return;
    hovered = row;
    tip.hidden = row < 0;
    stage.style.cursor = row < 0 ? "" : "pointer";
    if (row < 0) return;
    const image = imageOf(row);
    Object.assign(tip.style, { left: `${Math.min(at[0] + 16, scatter.width - 150)}px`, top: `${Math.min(at[1] + 16, scatter.height - 170)}px` });
    const value = values ? values[row] : NaN;
    const text = shown.mode === "class" ? (Number.isNaN(value) ? "no label" : visible(app.sets[0].classes[value])) : shown.mode === "cluster" ? `cluster ${value + 1}` : `${info.modes.find((mode) => mode.name === shown.mode).title.toLowerCase()} ${number(value, 2)}`;
    replace(tip, tile({ ...image, key: "" }, { side: 192 }), h("span", { text }));
  }

  function select_(row) {
    state.set({ img: row < 0 ? undefined : `images:${ids[row]}` }, { replace: true });
    if (row < 0) selected([]);
  }

  async function focus(row) {
    scatter.focus = row;
    scatter.lines = [];
    scatter.dirty = true;
    scatter.draw();
    if (row < 0) {
      if (!selection.length) inspect(null);
      return;
    }
    selection = [];
    scatter.marked = new Set();
    await inspectImage(row);
  }

  async function inspectImage(row) {
    const id = ids[row];
    inspector.classList.add("open");
    const box = h("div", {});
    replace(inspector, close(), box);
    const kept = { share: null };
    await load(box, async (options) => {
      const near = await get("map/neighbors", { row, run: runName() }, options);
      const facts = await get("neighbors", { run: runName(), set: "images", id, gallery: "images", space: "encoder", k: 60 }, options);
      kept.share = (await floats("map/values", { mode: "kept", layout: shown.layout, run: runName() }, options))[row];
      return { near, facts };
    }, ({ near, facts }) => {
      if (scatter.focus !== row) return;
      scatter.lines = near;
      scatter.draw();
      replace(
        box,
        tile(facts.query, { side: 384 }),
        h("h2", { class: "name", text: shortName(facts.query.key, 40) }),
        facts.query.label ? h("p", { class: "label", text: visible(facts.query.label) }) : null,
        h("p", {}, h("b", { text: `${Math.round(kept.share * near.length)} of ${near.length}` }), " true neighbors are near it on the map. The lines lead to all of them."),
        h("div", { class: "grid small" }, facts.neighbors.slice(0, 15).map((each) => tile(each, { side: 96, edge: classEdge(each.same), lines: [h("span", { class: "cos", text: number(each.cosine, 2) })], onclick: () => state.set({ img: state.refText(each) }) }))),
        h("p", { class: "links" }, h("a", { href: `#/neighbors?img=images:${id}`, text: "Open in Neighbors" })),
      );
    }, abort.signal);
  }

  function close() {
    return h("button", { type: "button", class: "icon close", "aria-label": "Close", title: "Close (Esc)", text: "×", onclick: () => { selected([]); state.set({ img: undefined }, { replace: true }); } });
  }

  function inspect(content) {
    inspector.classList.toggle("open", Boolean(content));
    if (content) replace(inspector, close(), content);
    else replace(inspector);
  }

  function lassoed(rows) {
    if (scatter.lassoMode) toggleLasso();
    state.set({ img: undefined }, { replace: true });
    selected(rows);
    if (!rows.length) toast("There is no image inside the lasso.");
  }

  function selected(rows) {
    selection = rows;
    scatter.marked = new Set(rows);
    scatter.dirty = true;
    scatter.draw();
    if (!rows.length) return inspect(null);
    const box = h("div", {});
    inspect(box);
    const classes = new Map();
    if (app.sets[0].classes) {
      floats("map/values", { mode: "class", run: runName() }).then((of) => {
        for (const row of rows) if (!Number.isNaN(of[row])) classes.set(of[row], (classes.get(of[row]) ?? 0) + 1);
        const most = Math.max(...classes.values());
        replace(box.querySelector(".bars"), [...classes].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([value, size]) => h("div", { class: "bar-row" }, h("span", { text: visible(app.sets[0].classes[value]) }), h("span", { class: "meter" }, h("i", { style: { width: `${(100 * size) / most}%`, background: hue(value) } })), h("small", { text: count(size) }))));
      });
    }
    replace(
      box,
      h("h2", { text: `${count(rows.length)} images selected` }),
      h("div", { class: "bars" }),
      app.static ? null : h("div", { class: "tools" },
        h("button", { type: "button", class: "primary", text: "Export as a list", onclick: () => exportRows(rows) })),
      h("div", { class: "grid small" }, rows.slice(0, 120).map((row) => tile({ ...imageOf(row), key: `image ${ids[row]}` }, { side: 96, onclick: () => state.set({ img: `images:${ids[row]}` }) }))),
      rows.length > 120 ? h("p", { class: "quiet", text: `… and ${count(rows.length - 120)} more` }) : null,
    );
    return undefined;
  }

  async function exportRows(rows) {
    try {
      const body = { kind: "selected on the map", entries: rows.map((row) => ({ id: ids[row], reason: `inside a lasso on the ${shown.layout.toUpperCase()} map` })) };
      download(await (await post("export", JSON.stringify(body))).blob(), "snclr-selection.txt");
    } catch (error) {
      toast(error.message);
    }
  }

  const recolor = () => scatter && ((scatter.dirty = true), scatter.draw());
  window.addEventListener("themechange", recolor);
  start();

  return {
    update,
    unmount() {
      for (const each of [abort, placing, coloring]) each.abort();
      window.removeEventListener("themechange", recolor);
      scatter?.destroy();
    },
    key(event) {
      if (!scatter) return false;
      if (event.key === "l") toggleLasso();
      else if (event.key === "Escape") { selected([]); state.set({ img: undefined }, { replace: true }); }
      else return scatter.key(event);
      return true;
    },
  };
}

