// Run: live curves, singular values, alerts, bad images, settings.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { chanceOf, count, h, number, percent, replace, shortName, visible } from "./dom.js";
import * as state from "./state.js";
import { load, message, segmented, stat } from "./ui.js";

export function mount(root, app) {
  const body = h("div", { class: "page" });
  root.append(body);
  let abort = new AbortController();
  let events = null;
  let onlyChanges = true;
  let latest = null;
  let spectrum = null;
  let name = null;

  function update(params) {
    const wanted = params.run ?? "a";
    if (wanted === name) return;
    name = wanted;
    abort.abort();
    abort = new AbortController();
    events?.close();
    latest = spectrum = null;
    load(body, (options) => get("run", { run: name }, options), show, abort.signal);
    get("run/spectrum", { run: name }, { signal: abort.signal }).then((found) => { spectrum = found; if (latest) show(latest); }, () => {});
    if (app.static) return;
    events = new EventSource(`api/events?run=${encodeURIComponent(name)}`);
    events.onmessage = (event) => show(JSON.parse(event.data));
  }

  function show(run) {
    latest = run;
    const records = run.points;
    const series = (metric) => {
      const used = records.filter((point) => point[metric.name] !== undefined);
      return [{ x: used.map((point) => point.epoch ?? point.step), y: used.map((point) => point[metric.name]) }];
    };
    const metrics = run.metrics.filter((metric) => records.some((point) => point[metric.name] !== undefined));
    const changed = run.settings.filter((each) => each.recipe !== null);
    const listed = onlyChanges && changed.length ? changed : run.settings;
    const last = records.at(-1) ?? {};
    const purity = last.neighbor_purity === undefined ? ["Neighbor cosine", number(last.neighbor_cosine, 2), "label-free sign of neighbor quality"] : ["Neighbor purity", percent(last.neighbor_purity), `share of the image's class${chanceOf(run.chance.neighbor_purity)}`];
    replace(
      body,
      h(
        "div",
        { class: "run-head" },
        h("h1", { text: visible(run.title) }),
        h("span", { class: run.state === "in progress" ? "pill live" : "pill done", text: run.state }),
        app.runs.length > 1 ? segmented("Run", app.runs.map((each) => [each.name, shortName(each.title, 18)]), name, (value) => state.set({ run: value })) : null,
      ),
      h(
        "div",
        { class: "stats" },
        stat("Epoch", run.epoch === null ? "–" : `${number(run.epoch, 1)}${run.epochs ? ` of ${run.epochs}` : ""}`, run.step === null ? "" : `step ${count(run.step)}`),
        stat("Loss", number(last.loss), ""),
        stat(...purity),
        stat("Spread", number(last.spread, 2), "1 spread out, 0 collapsed"),
        stat("Effective rank", number(last.effective_rank, 1), "features of one batch"),
        last.queue_knn === undefined ? null : stat("Queue kNN", percent(last.queue_knn), `within the queue${chanceOf(run.chance.queue_knn)}`),
        last.neighbor_agreement === undefined ? null : stat("Agreement", percent(last.neighbor_agreement), "of the nearest, at most 10, of two views"),
        stat("Unreadable images", count(run.bad_total), ""),
      ),
      run.alerts.length ? h("ul", { class: "alerts", role: "alert" }, run.alerts.map((text) => h("li", { text }))) : records.length ? h("p", { class: "quiet ok", text: "No alerts: no collapse, every loss finite." }) : null,
      h("h2", { text: "Curves" }),
      records.length ? h("div", { class: "charts" }, metrics.map((metric) => chart(metric.title, metric.description, series(metric), { share: metric.share, chance: run.chance[metric.name] })), spectrum ? spectrumChart() : null) : message("There are no metrics yet."),
      run.bad.length || records.length ? h("h2", { text: "Unreadable images" }) : null,
      run.bad.length ? h("div", { class: "table-wrap" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { text: "image" }), h("th", { text: "reason" }))), h("tbody", {}, run.bad.map((each) => h("tr", {}, h("td", { text: visible(each.key) }), h("td", { text: visible(each.reason) })))))) : records.length ? h("p", { class: "quiet", text: "Every image could be read." }) : null,
      h("div", { class: "run-head" },
        h("h2", { text: "Settings" }),
        run.settings.length ? segmented("Settings", [["changed", `Different from ${run.recipe ? "recipe " + visible(run.recipe) : "the recipe"} (${changed.length})`], ["all", `All (${run.settings.length})`]], onlyChanges && changed.length ? "changed" : "all", (value) => { onlyChanges = value === "changed"; show(latest); }) : null),
      run.settings.length ? h("div", { class: "table-wrap" }, h("table", { class: "settings" }, h("thead", {}, h("tr", {}, ["setting", "value", "recipe", "meaning"].map((text) => h("th", { text })))), h("tbody", {}, listed.map((each) => h("tr", { class: each.recipe === null ? "" : "changed" }, h("td", {}, h("code", { text: each.name })), h("td", { text: visible(each.value) }), h("td", { class: "quiet", text: each.recipe === null ? "" : visible(each.recipe) }), h("td", { class: "quiet", text: each.help })))))) : h("p", { class: "quiet", text: "The folder has no config.yaml." }),
    );
  }

  function spectrumChart() {
    const x = spectrum.values.map((_, index) => index + 1);
    return chart("Singular values", `rank ${number(spectrum.effective_rank, 0)} of ${spectrum.dims}; 90 % of the variance in ${spectrum.for_90_percent}`, [{ x, y: spectrum.values }], { log: true, xName: "dimension" });
  }

  return {
    update,
    unmount() {
      abort.abort();
      events?.close();
    },
  };
}
