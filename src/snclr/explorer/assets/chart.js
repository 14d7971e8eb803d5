// Line charts as SVG, redrawn when values arrive.

import { h, number, percent, s } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 170;
const PAD = { left: 44, right: 10, top: 10, bottom: 22 };

function ticks(low, high, wanted = 4) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

// `step` is the distance of the ticks: those of a narrow axis differ only in later digits.
function short(value, step = value) {
  if (Math.abs(value) >= 10000) return `${Math.round(value / 1000)}k`;
  const digits = value && step ? Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(Math.abs(step))) + 1 : 0;
  return String(Number(value.toPrecision(Math.max(3, digits))));
}

// `series`: [{x, y}] with arrays; `share` shows percent; `log` is a logarithmic y axis; `chance` is drawn as a level.
export function chart(title, note, series, { share = false, log = false, xName = "epoch", mark, chance } = {}) {
  const xs = series.flatMap((each) => each.x);
  const scaled = series.map((each) => ({ ...each, v: log ? each.y.map((y) => Math.log10(Math.max(y, 1e-6))) : each.y }));
  const vs = scaled.flatMap((each) => each.v);
  const last = series[0].y.at(-1);
  const show = (value) => (share ? percent(value, 1) : number(value, Math.abs(value) >= 100 ? 0 : 3));
  const value = h("output", { text: show(last) });
  const where = h("small", { text: note });
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  if (x0 === x1) x1 = x0 + 1;
  let [y0, y1] = [Math.min(...vs), Math.max(...vs)];
  if (share) [y0, y1] = [0, Math.max(y1, 0.05, chance ?? 0)];
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const px = (x) => PAD.left + ((x - x0) / (x1 - x0)) * (WIDTH - PAD.left - PAD.right);
  const py = (v) => HEIGHT - PAD.bottom - ((v - y0) / (y1 - y0)) * (HEIGHT - PAD.top - PAD.bottom);
  const yTicks = log ? ticks(Math.floor(y0), Math.ceil(y1)).filter((t) => Number.isInteger(t) && t >= y0 && t <= y1) : ticks(y0, y1);
  const cursor = s("g", { class: "cursor", visibility: "hidden" }, s("line", { y1: PAD.top, y2: HEIGHT - PAD.bottom }), s("circle", { r: 3.5 }));
  const drawing = s(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${show(last)}` },
    yTicks.map((t) => [s("line", { class: "gridline", x1: PAD.left, x2: WIDTH - PAD.right, y1: py(t), y2: py(t) }), s("text", { x: PAD.left - 6, y: py(t) + 3.5, "text-anchor": "end", text: log ? short(10 ** t) : share ? `${Math.round(100 * t)}%` : short(t, yTicks[1] - t || yTicks[0] - t) })]),
    ticks(x0, x1, 5).map((t) => s("text", { x: px(t), y: HEIGHT - 6, "text-anchor": "middle", text: short(t) })),
    chance === undefined ? null : [s("line", { class: "chance", x1: PAD.left, x2: WIDTH - PAD.right, y1: py(chance), y2: py(chance) }), s("text", { x: WIDTH - PAD.right, y: py(chance) + 12, "text-anchor": "end", text: `chance ${show(chance)}` })],
    mark === undefined ? null : s("line", { class: "mark", x1: px(mark), x2: px(mark), y1: PAD.top, y2: HEIGHT - PAD.bottom }),
    scaled.map((each, index) => s("path", { class: `line l${index}`, d: each.x.map((x, i) => `${i ? "L" : "M"}${px(x).toFixed(1)},${py(each.v[i]).toFixed(1)}`).join("") })),
    scaled.map((each) => (each.x.length < 40 ? each.x.map((x, i) => s("circle", { class: "dot", cx: px(x), cy: py(each.v[i]), r: 2 })) : null)),
    cursor,
  );
  drawing.addEventListener("pointermove", (event) => {
    const area = drawing.getBoundingClientRect();
    const x = x0 + ((((event.clientX - area.left) / area.width) * WIDTH - PAD.left) / (WIDTH - PAD.left - PAD.right)) * (x1 - x0);
    const first = scaled[0];
    let best = 0;
    first.x.forEach((each, i) => Math.abs(each - x) < Math.abs(first.x[best] - x) && (best = i));
    cursor.setAttribute("visibility", "visible");
    cursor.children[0].setAttribute("x1", px(first.x[best]));
    cursor.children[0].setAttribute("x2", px(first.x[best]));
    cursor.children[1].setAttribute("cx", px(first.x[best]));
    cursor.children[1].setAttribute("cy", py(first.v[best]));
    value.textContent = show(series[0].y[best]);
    where.textContent = `${xName} ${short(first.x[best])}`;
  });
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    value.textContent = show(last);
    where.textContent = note;
  });
  return h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "title", text: title }), value, where), drawing);
}
