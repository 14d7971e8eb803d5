// The state of the page is its address: #/screen?name=value&…

const listeners = new Set();

export function read() {
  const [path, text = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { screen: path || "neighbors", params: Object.fromEntries(new URLSearchParams(text)) };
}

function address(screen, params) {
  const used = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(used).toString();
  return `#/${screen}${text ? "?" + text : ""}`;
}

// Change parameters of the current screen; `replace` leaves no entry in the history.
export function set(changes, { replace = false } = {}) {
  const { screen, params } = read();
  go(screen, { ...params, ...changes }, { replace });
}

export function go(screen, params = {}, { replace = false } = {}) {
  const target = address(screen, params);
  if (target === location.hash) return;
  if (replace) history.replaceState(null, "", target);
  else history.pushState(null, "", target);
  announce();
}

function announce() {
  for (const listener of listeners) listener(read());
}

export function onChange(listener) {
  listeners.add(listener);
}

window.addEventListener("popstate", announce);
window.addEventListener("hashchange", announce);

// An image in the address: set:id.
export function refText(image) {
  return `${image.set}:${image.id}`;
}

export function parseRef(text) {
  const match = /^([a-z]+):(\d+)$/.exec(text || "");
  return match ? { set: match[1], id: Number(match[2]) } : null;
}
