// Views: what the augmentation makes of an image, and a preview of other strengths.

import { get } from "./api.js";
import { count, h, number, replace, shortName, visible } from "./dom.js";
import * as state from "./state.js";
import { load, segmented, slider, stat, toast } from "./ui.js";

const COUNT = 6;

export function mount(root, app) {
  const panel = h("aside", { class: "panel views-panel" });
  const body = h("section", { class: "views-body" });
  root.append(panel, body);
  let abort = new AbortController();
  let settings = null;
  let changes = [{}, {}];
  let view = "both";
  let timer = null;

  async function start() {
    await load(panel, (options) => get("views/settings", { run: "a" }, options), (found) => (settings = found), abort.signal);
    if (!settings) return;
    drawPanel();
    update(state.read().params);
  }

  function asked(params) {
    const image = state.parseRef(params.img);
    const usable = image && image.set !== "queries" ? image : { set: "images", id: 0 };
    return { image: usable, epoch: Math.max(0, Number(params.epoch) || 0), seed: params.seed === undefined ? settings.seed : Number(params.seed) };
  }

  function update(params) {
    if (!settings) return;
    const { image, epoch, seed } = asked(params);
    const extra = {};
    changes.forEach((of, index) => Object.entries(of).forEach(([name, value]) => (extra[`${index}.${name}`] = value)));
    abort.abort();
    abort = new AbortController();
    body.classList.add("stale");
    const status = body.childElementCount ? h("div") : body;
    load(status, (options) => get("views", { run: "a", set: image.set, id: image.id, epoch, seed: seed === settings.seed ? undefined : seed, count: COUNT, ...extra }, options), (found) => draw(found, epoch, seed), abort.signal).then((found) => {
      if (found === undefined && !abort.signal.aborted && status !== body) replace(body, status);
    });
  }

  function exactText(epoch, seed) {
    const { epochs } = settings;
    const has = `the run has ${count(epochs)} epoch${epochs === 1 ? "" : "s"}, counted from 0`;
    if (epoch >= epochs) return `A preview: ${has}.`;
    const last = epoch + COUNT - 1;
    if (last < epochs) return `Exactly the views of training: seed ${seed}, epochs ${epoch} to ${last}, counted from 0.`;
    return `Exactly the views of training, seed ${seed}, up to epoch ${epochs - 1}: ${has}. Later ones are a preview.`;
  }

  function draw(found, epoch, seed) {
    body.classList.remove("stale");
    const picture = (source, cosine, label) => h("figure", { class: "view" }, h("img", { src: source, alt: label, draggable: "false" }), h("figcaption", { text: cosine }));
    replace(
      body,
      h(
        "div",
        { class: "views-head" },
        h("figure", { class: "view center" }, h("img", { src: found.center, alt: "center crop" }), h("figcaption", { text: "center crop" })),
        h("div", {},
          h("h1", { class: "name", text: shortName(found.query.key, 50) }),
          found.query.label ? h("p", { class: "label", text: visible(found.query.label) }) : null,
          h("div", { class: "stats" },
            stat("Two views", number(found.mean_pair, 2), "mean cosine to each other"),
            stat("View to image", number(found.mean_image, 2), "mean cosine to the center crop")),
          h("p", { class: found.exact ? "quiet ok" : "quiet changed", text: found.exact ? exactText(epoch, seed) : "A preview: the image, the settings or the seed are not those of training." }),
        ),
      ),
      h("div", { class: "epochs" }, found.epochs.map((each) => h("div", { class: "epoch" }, h("h3", { text: `epoch ${each.epoch}` }), h("div", { class: "pair" }, each.views.map((one, index) => picture(one.image, number(one.cosine, 2), `view ${index + 1}`))), h("p", { class: "quiet", text: `to each other ${number(each.cosine, 2)}` })))),
      h("p", { class: "quiet", text: "Below each view: its cosine to the center crop, by encoder features. Views that look alike to the encoder teach it little; views below about 0.2 may no longer show the same thing." }),
    );
  }

  function drawPanel() {
    const { epoch, seed } = asked(state.read().params);
    const shown = view === "second" ? 1 : 0;
    const current = (name) => changes[shown][name] ?? settings.views[shown][name];
    replace(
      panel,
      h("details", { open: innerWidth > 700 },
        h("summary", { text: "Augmentation" }),
        h("div", { class: "two" },
          h("label", { class: "field" }, h("span", { text: "First epoch" }), h("input", { type: "number", min: 0, value: epoch, "aria-label": "First epoch", onchange: (event) => state.set({ epoch: event.target.value }, { replace: true }) })),
          h("label", { class: "field" }, h("span", { text: "Seed" }), h("input", { type: "number", min: 0, value: seed, disabled: app.static, "aria-label": "Seed", onchange: (event) => state.set({ seed: event.target.value }, { replace: true }) }))),
        h("div", { class: "field" }, h("span", { text: "Change" }), segmented("Change", [["both", "Both views"], ["first", "View 1"], ["second", "View 2"]], view, (value) => { view = value; drawPanel(); })),
        app.static ? h("p", { class: "quiet", text: "The sliders need the server: snclr explore RUN." }) : settings.sliders.map((each) => {
          const field = slider(each.name.replace("_", " "), { min: each.name.startsWith("crop") ? 0.02 : 0, max: each.limit, step: 0.01, value: current(each.name), format: (value) => value.toFixed(2), title: each.help, oninput: (value) => change(each.name, value) });
          if (changes[shown][each.name] !== undefined) field.classList.add("changed");
          field.dataset.setting = each.name;
          return field;
        }),
        h("div", { class: "tools" },
          h("button", { type: "button", text: "Reset", onclick: () => { changes = [{}, {}]; drawPanel(); update(state.read().params); } }),
          h("button", { type: "button", text: "Copy flags", onclick: copyFlags })),
        h("p", { class: "quiet", text: `The run uses --views ${settings.name ?? "byol"}${settings.crop_min === null ? "" : ` --crop-min ${settings.crop_min}`}.` })),
    );
  }

  function change(name, value) {
    const partner = { crop_min: "crop_max", crop_max: "crop_min" }[name];
    for (const index of view === "both" ? [0, 1] : view === "second" ? [1] : [0]) {
      const of = { ...changes[index], [name]: value };
      if (partner) {
        const other = of[partner] ?? settings.views[index][partner];
        if ((name === "crop_min") === other < value) of[partner] = value; // crop_min ≤ crop_max
      }
      for (const key of Object.keys(of)) if (Math.abs(of[key] - settings.views[index][key]) < 1e-9) delete of[key];
      changes[index] = of;
    }
    clearTimeout(timer);
    timer = setTimeout(() => update(state.read().params), 60);
  }

  async function copyFlags() {
    const flags = `--views ${settings.name ?? "byol"} --crop-min ${(changes[0].crop_min ?? settings.views[0].crop_min).toFixed(2)}`;
    const rest = Object.keys({ ...changes[0], ...changes[1] }).filter((name) => name !== "crop_min");
    try {
      await navigator.clipboard.writeText(flags);
      toast(`Copied: ${flags}${rest.length ? `. ${rest.join(", ")} have no flag: choose the --views group that comes closest` : ""}`);
    } catch {
      toast(flags);
    }
  }

  start();
  return {
    update,
    unmount() {
      abort.abort();
      clearTimeout(timer);
    },
    key(event) {
      const { image } = asked(state.read().params);
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined || event.target.type === "range") return false;
      const total = app.sets.find((each) => each.name === image.set).count;
      state.set({ img: `${image.set}:${(image.id + step + total) % total}` }, { replace: true });
      return true;
    },
  };
}

