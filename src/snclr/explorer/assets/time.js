// Time: the kept encoders of a run on one slider, with an aligned map and the neighbors of an image.

import { floats, get } from "./api.js";
import { chart } from "./chart.js";
import { categorical } from "./colors.js";
import { count, h, number, percent, replace, shortName, visible } from "./dom.js";
import { Scatter } from "./scatter.js";
import * as state from "./state.js";
import { load, message, tile } from "./ui.js";

export function mount(root, app) {
  const status = h("div", { class: "page" });
  const stage = h("div", { class: "stage" });
  const controls = h("div", { class: "time-bar" });
  const side = h("aside", { class: "inspector open time-side" });
  const abort = new AbortController();
  let scatter = null;
  let info = null;
  let maps = null;
  let ids = null;
  let at = 0;
  let timer = null;
  let history = null;
  let image = null;
  root.append(status);

  async function start() {
    await load(status, (options) => get("time", { run: "a" }, options), (found) => (info = found), abort.signal);
    if (!info) return;
    await load(status, async (options) => {
      maps = await floats("time/maps", { run: "a" }, options);
      ids = await floats("time/ids", { run: "a" }, options);
    }, () => {}, abort.signal);
    if (!ids) return;
    replace(root, h("div", { class: "map-area" }, stage, controls), side);
    try {
      scatter = new Scatter(stage, { imageOf: (row) => ({ set: "images", id: ids[row] }), onHover: (row) => (stage.style.cursor = row < 0 ? "" : "pointer"), onSelect: (row) => row >= 0 && state.set({ img: `images:${ids[row]}` }, { replace: true }) });
    } catch (error) {
      replace(stage, message(error.message, "error"));
      return;
    }
    root.scatter = scatter; // for tests and benchmarks
    scatter.setPoints(points(info.steps.length - 1));
    colors();
    update(state.read().params);
  }

  async function colors() {
    if (!app.sets[0].classes) return;
    const [all, rows] = await Promise.all([floats("map/values", { mode: "class", run: "a" }), floats("map/ids", { run: "a" })]);
    const of = new Map(Array.from(rows, (id, row) => [id, all[row]]));
    scatter.setColors(categorical(Float32Array.from(ids, (id) => of.get(id) ?? NaN)));
  }

  function points(index) {
    const size = 2 * info.count;
    return maps.slice(index * size, (index + 1) * size);
  }

  function epoch(step) {
    return info.steps_per_epoch ? ` · epoch ${number(step / info.steps_per_epoch, 1)}` : "";
  }

  function update(params) {
    if (!scatter) return;
    const wanted = info.steps.findIndex((each) => String(each.step) === params.step);
    const next = wanted < 0 ? info.steps.length - 1 : wanted;
    if (next !== at || !controls.childElementCount) {
      const moved = next !== at && controls.childElementCount;
      at = next;
      if (moved || at !== info.steps.length - 1) scatter.setPoints(points(at), { animate: true, fit: false });
    }
    drawControls();
    const chosen = state.parseRef(params.img);
    const row = chosen?.set === "images" ? ids.indexOf(chosen.id) : -1;
    if (!chosen || row < 0) {
      history = null;
      image = null;
      drawSide(chosen ? "The image is not in the sample. Choose one on the map." : "");
    } else if (image !== params.img) {
      image = params.img;
      history = null;
      load(side, (options) => get("time/history", { run: "a", id: chosen.id }, options), (found) => {
        history = found;
        drawSide();
      }, abort.signal);
    } else drawSide();
    scatter.focus = row;
    scatter.dirty = true;
    scatter.draw();
  }

  function drawControls() {
    const step = info.steps[at];
    const play = h("button", { type: "button", class: "primary play", title: "Play (Space)", "aria-label": timer ? "Pause" : "Play", text: timer ? "❚❚" : "▶", onclick: toggle });
    const range = controls.querySelector("input[type=range]");
    const line = h("span", { class: "now" }, h("b", { text: `step ${count(step.step)}${epoch(step.step)}` }), h("small", { text: [step.purity === null ? null : `purity ${percent(step.purity)}`, step.kept === null ? null : `${percent(step.kept)} of the neighbors as before`].filter(Boolean).join(" · ") }));
    if (range) {
      range.value = String(at);
      controls.querySelector(".play").replaceWith(play);
      controls.querySelector(".now").replaceWith(line);
      return;
    }
    replace(
      controls,
      play,
      h("input", { type: "range", min: 0, max: info.steps.length - 1, step: 1, value: at, "aria-label": "Step", oninput: (event) => state.set({ step: info.steps[Number(event.target.value)].step }, { replace: true }) }),
      line,
    );
  }

  function toggle() {
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else {
      if (at === info.steps.length - 1) state.set({ step: info.steps[0].step }, { replace: true });
      timer = setInterval(() => {
        if (at === info.steps.length - 1) return toggle();
        return state.set({ step: info.steps[at + 1].step }, { replace: true });
      }, 1100);
    }
    drawControls();
  }

  function drawSide(note = "") {
    const steps = info.steps.map((each) => each.step);
    const sampled = info.count < app.sets[0].count ? ` of a sample of ${count(info.count)} of the ${count(app.sets[0].count)} images` : "";
    const charts = [];
    const mark = steps[at];
    if (info.steps[0].purity !== null) charts.push(chart("Neighbor purity", `${info.k} neighbors${sampled}`, [{ x: steps, y: info.steps.map((each) => each.purity) }], { share: true, xName: "step", mark, chance: info.chance ?? undefined }));
    if (steps.length > 1) charts.push(chart("Neighbors kept", "share of the neighbors that were there at the kept encoder before", [{ x: steps.slice(1), y: info.steps.slice(1).map((each) => each.kept) }], { share: true, xName: "step", mark }));
    if (!history) {
      replace(side, h("h2", { text: "Time" }), note ? message(note) : null, h("p", { class: "quiet", text: `${steps.length} kept encoders. PCA of each, turned and scaled to the next. Choose an image on the map to see its neighbors come and go.` }), steps.length < 3 ? h("p", { class: "quiet", text: "Train with --keep-encoders 12 to keep more." }) : null, charts);
      return;
    }
    const now = history.steps[at];
    replace(
      side,
      h("button", { type: "button", class: "icon close", "aria-label": "Close", text: "×", onclick: () => state.set({ img: undefined }, { replace: true }) }),
      h("div", { class: "query-row" }, tile(history.query, { side: 96 }), h("div", {}, h("h2", { class: "name", text: shortName(history.query.key, 30) }), history.query.label ? h("p", { class: "label", text: visible(history.query.label) }) : null)),
      h("h3", { text: `Neighbors at step ${count(now.step)}` }),
      h("div", { class: "grid small" }, now.neighbors.map((each) => tile(each, { side: 96, edge: each.entered ? "entered" : undefined, badge: each.entered ? "new" : undefined, lines: [h("span", { class: "cos", text: number(each.cosine, 2) })], onclick: () => state.set({ img: state.refText(each) }, { replace: true }) }))),
      now.left.length ? [h("h3", { text: "Left since the kept encoder before" }), h("div", { class: "grid small gone" }, now.left.map((each) => tile(each, { side: 96, onclick: () => state.set({ img: state.refText(each) }, { replace: true }) })))] : h("p", { class: "quiet", text: at ? "None left since the kept encoder before." : "" }),
      h("h3", { text: "All steps" }),
      h("ol", { class: "history" }, history.steps.map((step, index) => h("li", { class: index === at ? "now" : "" }, h("button", { type: "button", class: "link", text: count(step.step), onclick: () => state.set({ step: step.step }, { replace: true }) }), h("span", { class: "strip" }, step.neighbors.map((each) => tile(each, { side: 48, edge: each.entered ? "entered" : undefined })))))),
      charts,
    );
  }

  start();
  return {
    update,
    unmount() {
      abort.abort();
      clearInterval(timer);
      scatter?.destroy();
    },
    key(event) {
      if (!scatter) return false;
      if (event.key === " ") toggle();
      else if (event.key === "Escape") state.set({ img: undefined }, { replace: true });
      else return scatter.key(event);
      return true;
    },
  };
}
