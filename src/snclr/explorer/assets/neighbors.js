// Neighbors: query by click, drop, paste, file or box; a click on a neighbor makes it the query.

import { get, imageUrl, post } from "./api.js";
import { count, h, number, percent, replace, shortName, visible } from "./dom.js";
import * as state from "./state.js";
import { arrowKeys, classEdge, load, message, segmented, select, slider, tile, toast } from "./ui.js";

const ASKED = 60;
const PAGE = 60;
const MAX_TRAIL = 12;
const known = new Map(); // descriptions of images for the breadcrumb

export function mount(root, app) {
  const browse = h("section", { class: "browse" });
  const result = h("section", { class: "result" });
  root.append(browse, result);
  let abort = new AbortController();
  let shown = "";

  function update(params) {
    abort.abort();
    abort = new AbortController();
    const image = state.parseRef(params.img);
    const key = image ? "result" : "browse";
    if (key !== shown) {
      shown = key;
      browse.hidden = Boolean(image);
      result.hidden = !image;
      replace(image ? browse : result);
    }
    if (image) showResult(result, app, params, image, abort.signal);
    else showBrowse(browse, app, params, abort.signal);
  }

  async function query(blob, name) {
    if (app.static) return toast("Your own images need the server: snclr explore RUN.");
    try {
      const response = await post("query", blob, { "x-file-name": encodeURIComponent(name || "dropped image") });
      const image = await response.json();
      known.set(state.refText(image), image);
      const { screen, params } = state.read();
      state.go("neighbors", { ...(screen === "neighbors" ? params : {}), img: state.refText(image), trail: undefined });
    } catch (error) {
      toast(error.message);
    }
    return undefined;
  }

  const over = (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  };
  const leave = (event) => event.relatedTarget === null && document.body.classList.remove("dropping");
  const drop = (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    const file = event.dataTransfer.files[0];
    if (file) query(file, file.name);
  };
  const paste = (event) => {
    const item = [...(event.clipboardData?.items ?? [])].find((each) => each.kind === "file");
    if (item) query(item.getAsFile(), "pasted image");
  };
  document.addEventListener("dragover", over);
  document.addEventListener("dragleave", leave);
  document.addEventListener("drop", drop);
  document.addEventListener("paste", paste);
  root.query = query;

  return {
    update,
    unmount() {
      abort.abort();
      document.removeEventListener("dragover", over);
      document.removeEventListener("dragleave", leave);
      document.removeEventListener("drop", drop);
      document.removeEventListener("paste", paste);
    },
    key(event) {
      const { params } = state.read();
      if (event.key === "Backspace") back(params);
      else if (event.key === "b" || event.key === "Escape") state.set({ img: undefined, trail: undefined });
      else return false;
      return true;
    },
  };
}

function trailOf(params) {
  return (params.trail ?? "").split(",").filter(state.parseRef);
}

function back(params) {
  const trail = trailOf(params);
  const last = trail.pop();
  state.set({ img: last, trail: trail.join(",") || undefined });
}

function walk(params, image) {
  const trail = [...trailOf(params), params.img].slice(-MAX_TRAIL);
  state.set({ img: state.refText(image), trail: trail.join(",") });
}

// Browse

function showBrowse(root, app, params, signal) {
  const images = app.sets[0];
  const grid = arrowKeys(h("div", { class: "grid browse-grid" }));
  const more = h("div", { class: "more" });
  const filters = { label: params.label ?? "", text: params.text ?? "", shuffle: params.order === "name" ? "" : "1" };
  const file = h("input", { type: "file", accept: "image/*", class: "sr", id: "file", onchange: () => file.files[0] && root.parentElement.query(file.files[0], file.files[0].name) });
  replace(
    root,
    h(
      "div",
      { class: "intro" },
      h("div", {}, h("h1", { text: "Whose neighbors?" }), h("p", { class: "quiet", text: `Choose one of ${count(images.count)} images of ${visible(images.title)}${app.static ? "." : ", or drop, paste or choose an image of your own."}` })),
      app.static ? null : h("label", { class: "dropzone", for: "file" }, file, h("span", { text: "Drop, paste or choose an image" })),
    ),
    h(
      "div",
      { class: "controls" },
      h("label", { class: "field grow" }, h("span", { text: "Search by name" }), h("input", { type: "search", value: filters.text, placeholder: "part of a file name", onchange: (event) => state.set({ text: event.target.value }, { replace: true }) })),
      images.classes ? select("Class", [["", "all classes"], ...images.classes.map((name) => [name, visible(name)])], filters.label, (value) => state.set({ label: value }, { replace: true })) : null,
      h("div", { class: "field" }, h("span", { text: "Order" }), segmented("Order", [["random", "Mixed"], ["name", "By name"]], params.order === "name" ? "name" : "random", (value) => state.set({ order: value === "name" ? "name" : undefined }, { replace: true }))),
    ),
    grid,
    more,
  );
  let offset = 0;
  async function page() {
    replace(more);
    await load(more, (options) => get("images", { set: "images", offset, limit: PAGE, ...filters }, options), (found) => {
      for (const image of found.images) {
        known.set(state.refText(image), image);
        grid.append(tile(image, { side: 192, lines: image.label ? [h("span", { class: "caption", text: visible(image.label) })] : [], onclick: () => state.set({ img: state.refText(image) }) }));
      }
      offset += found.images.length;
      if (!found.total) replace(more, message("No image matches."));
      else replace(more, h("span", { class: "quiet", text: `${count(offset)} of ${count(found.total)}` }), offset < found.total ? h("button", { type: "button", text: "Show more", onclick: page }) : null);
    }, signal);
  }
  page();
}

// Result

function showResult(root, app, params, image, signal) {
  const run = app.runs.find((each) => each.name === (params.run ?? "a")) ?? app.runs[0];
  const space = run.spaces.includes(params.space) ? params.space : run.spaces[0];
  const galleries = run.galleries.filter((each) => each.name !== "queue" || space === "projection");
  const gallery = galleries.some((each) => each.name === params.gallery) ? params.gallery : "images";
  const k = Math.min(ASKED, Math.max(4, Number(params.k) || 24));
  const order = ["w", "share"].includes(params.sort) ? params.sort : "cosine";

  if (!root.querySelector(".query")) replace(root, h("aside", { class: "query" }), h("div", { class: "found" }));
  const aside = root.querySelector(".query");
  const found = root.querySelector(".found");
  const grid = found.querySelector(".grid");
  if (grid) grid.classList.add("stale");
  drawTrail(aside, app, params, image);

  const ask = { run: run.name, set: image.set, id: image.id, gallery, space, k: ASKED };
  const status = grid ? h("div") : found;
  load(status, (options) => get("neighbors", ask, options), (answer) => {
    for (const each of [answer.query, ...answer.neighbors]) known.set(state.refText(each), each);
    drawQuery(aside, app, params, answer, k);
    drawFound(found, app, { params, run, space, gallery, galleries, k, order }, answer);
  }, signal).then((answer) => {
    if (answer === undefined && !signal.aborted && grid) replace(found, status);
  });
}

function drawTrail(aside, app, params, image) {
  const steps = trailOf(params);
  const last = known.get(state.refText(image)) ?? { ...image, key: "" };
  const trail = h(
    "nav",
    { class: "trail", "aria-label": "Path" },
    h("a", { href: "#/neighbors", text: "All images", onclick: (event) => { event.preventDefault(); state.set({ img: undefined, trail: undefined }); } }),
    steps.map((text, index) => {
      const each = known.get(text) ?? { ...state.parseRef(text), key: text };
      return [h("span", { class: "sep", text: "›" }), tile(each, { side: 48, onclick: () => state.set({ img: text, trail: steps.slice(0, index).join(",") || undefined }) })];
    }),
    h("span", { class: "sep", text: "›" }),
    tile(last, { side: 48, selected: true }),
  );
  const old = aside.querySelector(".trail");
  if (old) old.replaceWith(trail);
  else aside.prepend(trail);
}

function drawQuery(aside, app, params, answer, k) {
  const same = answer.neighbors.slice(0, k).map((each) => each.same).filter((each) => each !== null);
  const image = answer.query;
  const picture = h("img", { src: imageUrl(image, 384), alt: visible(image.key), draggable: "false" });
  const frame = h("div", { class: "big" }, picture);
  if (!app.static) boxDrawing(frame, image, params);
  replace(
    aside,
    aside.querySelector(".trail"),
    frame,
    h("h1", { class: "name", text: shortName(image.key, 60), title: visible(image.key) }),
    image.label ? h("p", { class: "label", text: visible(image.label) }) : null,
    h(
      "dl",
      { class: "facts" },
      same.length ? [h("dt", { text: "Neighbors of its class" }), h("dd", { text: percent(same.filter(Boolean).length / same.length) })] : null,
      answer.loss === null ? null : [h("dt", { text: "Loss of one direction" }), h("dd", { text: number(answer.loss) })],
      answer.own ? [h("dt", { text: "Share of its own view y2" }), h("dd", { text: percent(answer.own.share, 1) })] : null,
    ),
    app.static ? null : h("p", { class: "quiet hint", text: "Drag on the image to search for a part of it." }),
    image.set === "images" ? h("p", { class: "links" }, ["map", "views", "time", "compare"].map((screen) => h("a", { href: `#/${screen}?img=${state.refText(image)}`, text: { map: "On the map", views: "Its views", time: "Over time", compare: "Compare" }[screen] }))) : null,
  );
}

// Draw a box with the pointer; a click is not a box.
function boxDrawing(frame, image, params) {
  let start = null;
  const box = h("div", { class: "box", hidden: true });
  frame.append(box);
  const at = (event) => {
    const area = frame.querySelector("img").getBoundingClientRect();
    return [Math.min(1, Math.max(0, (event.clientX - area.left) / area.width)), Math.min(1, Math.max(0, (event.clientY - area.top) / area.height))];
  };
  const bounds = (a, b) => [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[0], b[0]), Math.max(a[1], b[1])];
  frame.addEventListener("pointerdown", (event) => {
    start = at(event);
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", (event) => {
    if (!start) return;
    const [left, top, right, bottom] = bounds(start, at(event));
    const picture = frame.querySelector("img");
    box.hidden = false;
    Object.assign(box.style, {
      left: `${picture.offsetLeft + left * picture.offsetWidth}px`, top: `${picture.offsetTop + top * picture.offsetHeight}px`,
      width: `${(right - left) * picture.offsetWidth}px`, height: `${(bottom - top) * picture.offsetHeight}px`,
    });
  });
  frame.addEventListener("pointerup", async (event) => {
    if (!start) return;
    const drawn = bounds(start, at(event));
    start = null;
    if (drawn[2] - drawn[0] < 0.05 || drawn[3] - drawn[1] < 0.05) {
      box.hidden = true;
      return;
    }
    try {
      const response = await post("box", JSON.stringify({ set: image.set, id: image.id, box: drawn }));
      const made = await response.json();
      known.set(state.refText(made), made);
      walk(params, made);
    } catch (error) {
      box.hidden = true;
      toast(error.message);
    }
  });
}

function drawFound(root, app, view, answer) {
  const { params, run, space, gallery, galleries, k, order } = view;
  const near = answer.neighbors.slice(0, k);
  if (order !== "cosine") near.sort((a, b) => (b[order] ?? -1) - (a[order] ?? -1) || a.rank - b.rank);
  const hasLoss = near.some((each) => each.share !== null);
  const largest = Math.max(1e-9, ...near.map((each) => each.share ?? 0));
  const grid = arrowKeys(
    h(
      "div",
      { class: "grid neighbor-grid" },
      near.map((each) =>
        tile(each, {
          side: 192,
          edge: classEdge(each.same),
          badge: String(each.rank),
          lines: [
            h("span", { class: "cos" }, h("b", { text: number(each.cosine) }), each.label ? h("span", { class: "caption", text: visible(each.label) }) : h("span", { class: "caption", text: shortName(each.key, 16) })),
            hasLoss
              ? h(
                  "span",
                  { class: each.share === null ? "terms none" : "terms", title: each.share === null ? `not among the K = ${answer.loss_neighbors} neighbors of the loss` : `w ${number(each.w)}, p ${number(each.p)}, ${percent(each.share, 1)} of the loss` },
                  h("span", { class: "meter" }, h("i", { style: { width: `${(100 * (each.share ?? 0)) / largest}%` } })),
                  h("span", { text: each.share === null ? "not in the loss" : `w ${number(each.w, 2)} · p ${number(each.p, 2)} · ${percent(each.share, 1)}` }),
                )
              : h("span", { class: "terms", text: `w ${number(each.w, 2)}` }),
          ],
          onclick: () => walk(params, each),
        }),
      ),
    ),
  );
  const set = (name) => (value) => state.set({ [name]: value }, { replace: true });
  replace(
    root,
    h(
      "div",
      { class: "controls" },
      app.runs.length > 1 ? h("div", { class: "field" }, h("span", { text: "Run" }), segmented("Run", app.runs.map((each) => [each.name, shortName(each.title, 18)]), run.name, set("run"))) : null,
      h("div", { class: "field" }, h("span", { text: "Rank by" }), segmented("Rank by", run.spaces.map((name) => [name, { projection: "Projection", encoder: "Encoder" }[name], { projection: "y2, the space of the loss (Eq. 3)", encoder: "features for other tasks" }[name]]), space, set("space"))),
      galleries.length > 1 ? select("Search in", galleries.map((each) => [each.name, `${shortName(each.title, 34)} (${count(each.count)})`]), gallery, set("gallery")) : null,
      hasLoss ? h("div", { class: "field" }, h("span", { text: "Order" }), segmented("Order", [["cosine", "Cosine"], ["w", "w"], ["share", "Share"]], order, set("sort"))) : null,
      slider("Neighbors", { min: 4, max: ASKED, step: 1, value: k, onchange: (value) => set("k")(value) }),
    ),
    answer.own ? lossBar(answer, near) : null,
    h("p", { class: "quiet search-note", text: `${answer.search} in ${answer.milliseconds} ms, by cosine. ${answer.note ?? ""}.` }),
    near.length ? grid : message("There is no other image in this gallery."),
  );
}

// The loss of the query as one bar: its own view, then its neighbors.
function lossBar(answer, near) {
  const parts = near.filter((each) => each.share !== null);
  const rest = Math.max(0, 1 - answer.own.share - parts.reduce((sum, each) => sum + each.share, 0));
  const piece = (share, kind, title) => (share > 0 ? h("i", { class: kind, title, style: { flexGrow: String(share) } }) : null);
  return h(
    "figure",
    { class: "loss-bar" },
    h("figcaption", {}, "Share of the loss: ", h("b", { text: `${percent(answer.own.share, 1)} its own view` }), `, ${percent(1 - answer.own.share - rest, 1)} the neighbors shown`, rest > 0.0005 ? `, ${percent(rest, 1)} others` : ""),
    h("div", { class: "stack" }, piece(answer.own.share, "own", "its own second view y2"), parts.map((each) => piece(each.share, classEdge(each.same) ?? "plain", `${visible(each.key)}: ${percent(each.share, 1)}`)), piece(rest, "rest", "neighbors not shown")),
  );
}
