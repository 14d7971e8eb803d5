// Parts that all screens share: image tiles, progress, messages, controls.

import { imageUrl } from "./api.js";
import { h, replace, shortName, visible } from "./dom.js";

// An image as a button. `edge` is "same" or "other" for the class edge; `lines` are the captions below.
export function tile(image, { side = 96, edge, lines = [], badge, selected, onclick, title } = {}) {
  const picture = h("img", { src: imageUrl(image, side), alt: "", loading: "lazy", decoding: "async", draggable: "false" });
  picture.addEventListener("error", () => picture.classList.add("broken"));
  const name = visible(image.key ?? "");
  const label = image.label ? `, ${visible(image.label)}` : "";
  return h(
    onclick ? "button" : "div",
    {
      class: ["tile", edge, selected && "selected"].filter(Boolean).join(" "),
      type: onclick ? "button" : undefined,
      title: title ?? name + label,
      "aria-label": name + label,
      "data-ref": `${image.set}:${image.id}`,
      onclick,
    },
    h("span", { class: "frame" }, picture, badge ? h("span", { class: "badge", text: badge }) : null),
    lines.length ? h("span", { class: "lines" }, lines) : null,
  );
}

export function progressBox(job) {
  const share = job.total ? job.done / job.total : 0;
  const left = job.total && job.done && job.seconds > 2 ? ` · about ${Math.ceil((job.seconds / share) * (1 - share))} s left` : "";
  const amount = job.total > 100 ? ` · ${job.done.toLocaleString("en-US")} of ${job.total.toLocaleString("en-US")}` : "";
  return h(
    "div",
    { class: "pending", role: "status" },
    h("p", { text: `Computing ${job.title}${job.state === "queued" ? " · waiting" : amount + left}` }),
    h("progress", { max: "1", value: job.total ? share : undefined }),
  );
}

export function message(text, kind = "note") {
  return h("p", { class: `message ${kind}`, role: kind === "error" ? "alert" : "status", text });
}

// Run an asynchronous load into a container: progress while it is computed, the error if it fails.
export async function load(container, fetcher, show, signal) {
  try {
    const value = await fetcher({ signal, onPending: (job) => replace(container, progressBox(job)) });
    if (signal?.aborted) return undefined;
    show(value);
    return value;
  } catch (error) {
    if (error.name !== "AbortError") replace(container, message(error.message, "error"));
    return undefined;
  }
}

export function segmented(label, options, current, onchange) {
  return h(
    "div",
    { class: "segmented", role: "radiogroup", "aria-label": label },
    options.map(([value, text, title]) =>
      h("button", {
        type: "button", role: "radio", "aria-checked": String(value === current), "data-value": value, text, title,
        onclick: () => onchange(value),
      }),
    ),
  );
}

export function select(label, options, current, onchange) {
  return h(
    "label",
    { class: "field" },
    h("span", { text: label }),
    h(
      "select",
      { onchange: (event) => onchange(event.target.value), "aria-label": label },
      options.map(([value, text]) => h("option", { value, text, selected: value === current })),
    ),
  );
}

export function slider(label, { min, max, step, value, format = String, oninput, onchange, title }) {
  const shown = h("output", { text: format(value) });
  const input = h("input", {
    type: "range", min, max, step, value, "aria-label": label,
    oninput: (event) => {
      shown.textContent = format(Number(event.target.value));
      oninput?.(Number(event.target.value));
    },
    onchange: (event) => onchange?.(Number(event.target.value)),
  });
  return h("label", { class: "field slider", title }, h("span", {}, label, " ", shown), input);
}

export function stat(title, value, note) {
  return h("div", { class: "stat" }, h("span", { text: title }), h("b", { text: value }), note ? h("small", { text: note }) : null);
}

export function classEdge(same) {
  return same === null || same === undefined ? undefined : same ? "same" : "other";
}

// Move the focus between the tiles of a grid with the arrow keys.
export function arrowKeys(grid) {
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up" }[event.key];
    if (step === undefined) return;
    const tiles = [...grid.querySelectorAll("button.tile")];
    const at = tiles.indexOf(document.activeElement);
    if (at < 0) return;
    const top = tiles[0].offsetTop;
    const columns = Math.max(1, tiles.filter((each) => each.offsetTop === top).length);
    const target = tiles[at + (step === "down" ? columns : step === "up" ? -columns : step)];
    if (target) {
      target.focus();
      event.preventDefault();
    }
  });
  return grid;
}

export function caption(image, length = 22) {
  return h("span", { class: "caption", text: image.label ? visible(image.label) : shortName(image.key, length) });
}

export function toast(text) {
  const box = h("div", { class: "toast", role: "status", text });
  document.body.append(box);
  setTimeout(() => box.remove(), 3500);
}

export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
