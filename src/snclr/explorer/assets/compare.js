// Compare: the neighbors of each image by two encoders.

import { get } from "./api.js";
import { chanceOf, count, h, number, percent, replace, shortName, visible } from "./dom.js";
import * as state from "./state.js";
import { arrowKeys, classEdge, load, message, select, stat, tile } from "./ui.js";

const PAGE = 60;

export function mount(root, app) {
  const head = h("div", { class: "page compare-head" });
  const list = h("section", { class: "compare-list" });
  const detail = h("section", { class: "compare-detail" });
  root.append(head, h("div", { class: "compare-body" }, detail, list));
  let abort = new AbortController(); // of the two encoders
  let choosing = new AbortController(); // of the image
  let encoders = null;
  let shown = "";
  let offset = 0;

  async function start() {
    await load(head, (options) => get("compare/encoders", {}, options), (found) => (encoders = found), abort.signal);
    if (encoders) update(state.read().params);
  }

  function pair(params) {
    const names = encoders.map((each) => each.name);
    const one = names.includes(params.one) ? params.one : "a";
    const other = names.includes(params.other) ? params.other : names[1];
    return { one, other };
  }

  function update(params) {
    if (!encoders) return;
    const { one, other } = pair(params);
    if (`${one}/${other}` !== shown) {
      shown = `${one}/${other}`;
      for (const each of [abort, choosing]) each.abort();
      abort = new AbortController();
      offset = 0;
      drawHead(one, other, null);
      replace(list, message("Computing the neighbors of each image by both encoders."));
      replace(detail, message("Both encoders' neighbors of one image are shown here, first of the image whose neighbors differ most."));
      load(list, (options) => get("compare", { one, other, limit: PAGE, offset: 0 }, options), (found) => {
        drawHead(one, other, found);
        const grid = arrowKeys(h("div", { class: "grid browse-grid" }));
        replace(list, h("h2", { text: "Images by change" }), h("p", { class: "quiet", text: "Those whose neighbors differ most come first. The number is overlap@" + found.k + "." }), grid, h("div", { class: "more" }));
        append(grid, found, one, other);
        if (!state.parseRef(state.read().params.img)) showPair(found.images[0].id, one, other);
      }, abort.signal);
    }
    const image = state.parseRef(params.img);
    if (image) showPair(image.id, one, other);
  }

  function append(grid, found, one, other) {
    for (const image of found.images) grid.append(tile(image, { side: 96, badge: percent(image.overlap), lines: image.label ? [h("span", { class: "caption", text: visible(image.label) })] : [], onclick: () => { state.set({ img: state.refText(image) }, { replace: true }); detail.scrollIntoView({ block: "nearest" }); } }));
    offset += found.images.length;
    replace(list.querySelector(".more"), h("span", { class: "quiet", text: `${count(offset)} of ${count(found.count)}` }), offset < found.count && !app.static ? h("button", { type: "button", text: "Show more", onclick: () => load(list.querySelector(".more"), (options) => get("compare", { one, other, limit: PAGE, offset }, options), (next) => append(grid, next, one, other), abort.signal) }) : null);
  }

  function drawHead(one, other, found) {
    const options = encoders.map((each) => [each.name, visible(each.title)]);
    const title = (name) => shortName(encoders.find((each) => each.name === name).title, 30);
    replace(
      head,
      h("div", { class: "controls" }, select("Encoder", options, one, (value) => state.set({ one: value }, { replace: true })), h("span", { class: "versus", text: "against" }), select("Other encoder", options, other, (value) => state.set({ other: value }, { replace: true }))),
      found
        ? h(
            "div",
            { class: "stats" },
            stat(`Overlap@${found.k}`, percent(found.overlap), "mean share of common neighbors"),
            found.purity[0] === null ? null : stat(`Purity, ${title(one)}`, percent(found.purity[0], 1), `${found.k} neighbors${chanceOf(found.chance)}`),
            found.purity[1] === null ? null : stat(`Purity, ${title(other)}`, percent(found.purity[1], 1), `${found.k} neighbors${chanceOf(found.chance)}`),
            histogram(found),
          )
        : null,
      found && found.count < app.sets[0].count ? h("p", { class: "quiet", text: `On ${count(found.count)} of ${count(app.sets[0].count)} images; neighbors are searched among these.` }) : null,
    );
  }

  function histogram(found) {
    const most = Math.max(...found.histogram);
    return h("figure", { class: "histogram" }, h("div", { class: "columns" }, found.histogram.map((size, common) => h("i", { title: `${count(size)} images share ${common} of ${found.k} neighbors`, style: { height: `${Math.max(2, (100 * size) / most)}%` } }))), h("figcaption", {}, h("span", { text: "0 common" }), h("span", { text: `${found.k} common` })));
  }

  function showPair(id, one, other) {
    choosing.abort();
    choosing = new AbortController();
    load(detail, (options) => get("compare/pair", { one, other, id }, options), (found) => {
      const row = (name, near) => h("div", { class: "pair-row" }, h("h3", { text: shortName(encoders.find((each) => each.name === name).title, 44) }), h("div", { class: "grid pair-grid" }, near.map((each) => tile(each, { side: 96, edge: classEdge(each.same), selected: each.common, lines: [h("span", { class: "cos", text: number(each.cosine, 2) })], title: each.common ? "in both lists" : "only here", onclick: () => state.set({ img: state.refText(each) }, { replace: true }) }))));
      const common = found.one.filter((each) => each.common).length;
      replace(
        detail,
        h("div", { class: "query-row" }, tile(found.query, { side: 192 }), h("div", {}, h("h2", { class: "name", text: shortName(found.query.key, 40) }), found.query.label ? h("p", { class: "label", text: visible(found.query.label) }) : null, h("p", {}, h("b", { text: `${common} of ${found.one.length}` }), " neighbors are common, outlined in both rows."), h("p", { class: "links" }, h("a", { href: `#/neighbors?img=images:${found.query.id}`, text: "Open in Neighbors" })))),
        row(one, found.one),
        row(other, found.other),
      );
    }, choosing.signal);
  }

  start();
  return { update, unmount: () => [abort, choosing].forEach((each) => each.abort()) };
}
