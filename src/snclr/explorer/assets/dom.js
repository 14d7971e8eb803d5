// Elements without innerHTML: names of files and classes are always text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]/g;

// Make control and direction characters of a name visible.
export function visible(name) {
  return String(name).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

// The end of a path says more than its beginning.
export function shortName(name, length = 28) {
  const text = visible(name);
  return text.length > length ? "…" + text.slice(text.length - length + 1) : text;
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return Number(value).toPrecision(2);
  return Number(value).toFixed(digits);
}

// ", chance 22 %", or nothing if the chance level is unknown.
export function chanceOf(level) {
  return level === undefined || level === null ? "" : `, chance ${percent(level)}`;
}

// "1 group", "2 groups".
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function count(value) {
  return Number(value).toLocaleString("en-US");
}
