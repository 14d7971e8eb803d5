// Curate: what to look at before training, and a list file of it. Nothing is deleted.

import { get, post } from "./api.js";
import { count, counted, h, number, percent, replace, shortName, visible } from "./dom.js";
import * as state from "./state.js";
import { download, load, message, segmented, slider, tile, toast } from "./ui.js";

const KINDS = { duplicates: "Near-duplicates", leaks: "Leaks", outliers: "Outliers", labels: "Suspect labels", diverse: "Diverse subset" };
const MAX_GROUPS = 80;
const MAX_MEMBERS = 24; // shown of a group
const MAX_SHOWN = 240;

export function mount(root, app) {
  const tabs = h("div", { class: "page curate-tabs" });
  const controls = h("div", { class: "page curate-controls" });
  const body = h("section", { class: "page curate-body" });
  const bar = h("footer", { class: "export-bar" });
  root.append(tabs, controls, body, bar);
  let abort = new AbortController();
  let kind = "";
  let data = null;
  let flagged = new Map(); // id → reason
  let overruled = new Map(); // id → whether the person wants it in the list

  function update(params) {
    const wanted = KINDS[params.find] ? params.find : "duplicates";
    if (wanted === kind) return;
    kind = wanted;
    data = null;
    flagged = new Map();
    overruled = new Map();
    abort.abort();
    abort = new AbortController();
    replace(tabs, segmented("Find", Object.entries(KINDS), kind, (value) => state.set({ find: value }, { replace: true })));
    replace(controls);
    replace(bar);
    replace(body);
    load(body, (options) => get(`curate/${kind}`, { run: "a" }, options), (found) => {
      data = found;
      ({ duplicates, leaks, outliers, labels, diverse })[kind]();
    }, abort.signal);
  }

  const set = () => (kind === "leaks" ? "test" : "images");

  // An image in the list has a mark; a click takes it out or puts it in.
  function choice(image, reason, lines, listed = true) {
    const wanted = overruled.get(image.id) ?? listed;
    if (wanted) flagged.set(image.id, reason);
    else flagged.delete(image.id);
    const element = tile(image, {
      side: 192, selected: wanted, badge: wanted ? "✓" : undefined, lines, title: `${visible(image.key)}\n${wanted ? "in the list" : "not in the list"}; click to change`,
      onclick: () => {
        overruled.set(image.id, !wanted);
        element.replaceWith(choice(image, reason, lines, listed));
        drawBar();
      },
    });
    element.classList.add("choice");
    element.setAttribute("aria-pressed", String(wanted));
    return element;
  }

  // Put an image that is not shown in the list, unless a click has taken it out.
  function listUnshown(id, reason) {
    if (overruled.get(id) !== false) flagged.set(id, reason);
  }

  function unshown(number, noun = "", listed = "all") {
    return number > 0 ? h("p", { class: "quiet", text: `… and ${count(number)} more${noun}, ${listed} in the list` }) : null;
  }

  function duplicates() {
    const low = Math.max(data.floor, 0.5);
    let threshold = Math.max(low, 0.98);
    const draw = () => {
      flagged = new Map();
      const groups = group(data.pairs, threshold);
      const shown = groups.slice(0, MAX_GROUPS);
      groups.forEach((each, index) => each.members.slice(index < MAX_GROUPS ? MAX_MEMBERS : 1).forEach((id) => listUnshown(id, reason(each, id))));
      replace(
        body,
        groups.length ? null : message("No pair is this similar. Lower the threshold."),
        h("div", { class: "groups" }, shown.map((each) => h("div", { class: "group" }, h("h3", { text: `${each.members.length} images, cosine ${number(each.highest, 3)}` }), h("div", { class: "grid" }, each.members.slice(0, MAX_MEMBERS).map((id, index) => choice(data.images[id], reason(each, id), [h("span", { class: "caption", text: shortName(data.images[id].key, 18) })], index > 0))), unshown(each.members.length - MAX_MEMBERS)))),
        unshown(groups.length - MAX_GROUPS, " groups", "all but the first image of each"),
      );
      replace(note, `${counted(groups.length, "group")}, ${counted(groups.reduce((sum, each) => sum + each.members.length - 1, 0), "image")} beyond the first of each.`);
      drawBar();
    };
    const reason = (each, id) => {
      const pair = each.pairs.filter(([a, b]) => a === id || b === id).sort((x, y) => y[2] - x[2])[0];
      const other = pair[0] === id ? pair[1] : pair[0];
      return `near-duplicate of ${data.images[other].key} (cosine ${pair[2].toFixed(4)})`;
    };
    const note = h("p", { class: "quiet" });
    replace(controls, slider("Smallest cosine", { min: low, max: 1, step: 0.001, value: threshold, format: (value) => value.toFixed(3), oninput: (value) => { threshold = value; draw(); } }), note, h("p", { class: "quiet", text: `From ${data.note}. The first image of each group stays.` }));
    draw();
  }

  function leaks() {
    let threshold = 0.98;
    const note = h("p", { class: "quiet" });
    const reason = (pair) => `leak: cosine ${pair.cosine.toFixed(4)} to the training image ${pair.train.key}`;
    const draw = () => {
      flagged = new Map();
      const found = data.pairs.filter((pair) => pair.cosine >= threshold);
      const more = found.length === data.pairs.length && data.pairs.length < data.count; // the server sends the first ones
      found.slice(MAX_SHOWN).forEach((pair) => listUnshown(pair.test.id, reason(pair)));
      replace(
        body,
        found.length ? null : message("No test image has a training image this similar. Lower the threshold."),
        h("div", { class: "pairs" }, found.slice(0, MAX_SHOWN).map((pair) => h("div", { class: "leak" }, choice(pair.test, reason(pair), [h("span", { class: "caption", text: "test" })]), h("span", { class: "cos", text: number(pair.cosine, 3) }), tile(pair.train, { side: 192, lines: [h("span", { class: "caption", text: "training" })] })))),
        unshown(found.length - MAX_SHOWN),
      );
      replace(note, `${more ? "At least " : ""}${count(found.length)} of ${count(data.count)} test images. The list names the test images${more ? "; snclr curate --find leaks lists all" : ""}.`);
      drawBar();
    };
    replace(controls, slider("Smallest cosine", { min: 0.5, max: 1, step: 0.001, value: threshold, format: (value) => value.toFixed(3), oninput: (value) => { threshold = value; draw(); } }), note);
    draw();
  }

  function outliers() {
    ranked("Images", Math.min(40, data.images.length), (image) => `outlier: mean cosine ${(1 - image.score).toFixed(4)} to its ${data.k} nearest images`, (image) => [h("span", { class: "cos" }, h("b", { text: number(1 - image.score, 2) }), h("span", { class: "caption", text: image.label ? visible(image.label) : shortName(image.key, 14) }))], `The number is the mean cosine to the ${data.k} nearest images; the median of all images is ${number(1 - data.median, 2)}.`);
  }

  function labels() {
    ranked("Images", Math.min(60, data.images.length), (image) => `labeled ${image.label} (${percent(image.own)} of the vote), neighbors vote ${image.voted} (${percent(image.share)})`, (image) => [h("span", { class: "vote" }, h("s", { text: visible(image.label) }), " ", h("b", { text: visible(image.voted) })), h("span", { class: "caption", text: `${percent(image.share)} of the vote` })], `${count(data.total)} of ${count(data.labeled)} labeled images: their ${data.k} neighbors vote for another class (leave-one-out, weights exp(cosine / 0.07)). Clearest first.`);
  }

  function diverse() {
    ranked("Size of the subset", Math.min(60, data.images.length), (image, index) => (index ? `${index + 1}: cosine at most ${image.cosine.toFixed(4)} to those before` : "1: nearest to the mean of all images"), (image, index) => [h("span", { class: "cos" }, h("b", { text: index ? number(image.cosine, 2) : "first" }), h("span", { class: "caption", text: image.label ? visible(image.label) : shortName(image.key, 14) }))], `Greedy k-center of ${count(data.count)} images: each is the one farthest from all before it. The number is its cosine to the nearest of these. Label these first.`);
  }

  function ranked(title, start, reason, lines, text) {
    let size = start;
    const draw = () => {
      flagged = new Map();
      const used = data.images.slice(0, size);
      used.slice(MAX_SHOWN).forEach((image, index) => listUnshown(image.id, reason(image, index + MAX_SHOWN)));
      replace(body, used.length ? h("div", { class: "grid browse-grid" }, used.slice(0, MAX_SHOWN).map((image, index) => choice(image, reason(image, index), lines(image, index)))) : message("There are none."), unshown(used.length - MAX_SHOWN));
      drawBar();
    };
    replace(controls, slider(title, { min: 1, max: Math.max(1, data.images.length), step: 1, value: size, format: count, oninput: (value) => { size = value; draw(); } }), h("p", { class: "quiet", text }));
    draw();
  }

  function drawBar() {
    replace(
      bar,
      h("span", {}, h("b", { text: count(flagged.size) }), flagged.size === 1 ? " image in the list" : " images in the list"),
      app.static
        ? h("span", { class: "quiet", text: "snclr curate writes this list" })
        : [
            h("button", { type: "button", class: "primary", disabled: !flagged.size, text: "Export the list", onclick: () => save(false) }),
            h("button", { type: "button", disabled: !flagged.size, text: "Export all others", onclick: () => save(true) }),
          ],
      h("span", { class: "quiet wide-only", text: "For --data and finetune --labels. No image is deleted." }),
    );
  }

  async function save(rest) {
    const entries = [...flagged].map(([id, reason]) => ({ id, reason }));
    try {
      const response = await post("export", JSON.stringify({ kind: KINDS[kind].toLowerCase(), set: set(), entries, rest }));
      download(await response.blob(), `snclr-${kind}${rest ? "-others" : ""}.txt`);
    } catch (error) {
      toast(error.message);
    }
  }

  return { update, unmount: () => abort.abort() };
}

// Join pairs above a threshold to groups, the largest first.
export function group(pairs, threshold) {
  const parent = new Map();
  const root = (id) => {
    while (parent.get(id) !== id) id = parent.get(id);
    return id;
  };
  const used = pairs.filter(([, , cosine]) => cosine >= threshold);
  for (const [a, b] of used) {
    for (const id of [a, b]) if (!parent.has(id)) parent.set(id, id);
    const [x, y] = [root(a), root(b)];
    parent.set(Math.max(x, y), Math.min(x, y));
  }
  const groups = new Map();
  for (const id of parent.keys()) {
    const top = root(id);
    if (!groups.has(top)) groups.set(top, { members: [], pairs: [], highest: 0 });
    groups.get(top).members.push(id);
  }
  for (const pair of used) {
    const of = groups.get(root(pair[0]));
    of.pairs.push(pair);
    of.highest = Math.max(of.highest, pair[2]);
  }
  for (const each of groups.values()) each.members.sort((a, b) => a - b);
  return [...groups.values()].sort((a, b) => b.members.length - a.members.length || b.highest - a.highest);
}
