// Requests to the server. Values that are still computed answer 202 with their progress and are requested again.
// In a static folder the same values come from script files.

const POLL_MILLISECONDS = 350;
const chunks = new Map();

export const isStatic = typeof window.SNCLR_FILES === "object";

export class ApiError extends Error {}

function query(params) {
  const used = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return used.sort(([a], [b]) => (a < b ? -1 : 1)).map((pair) => pair.map(encodeURIComponent).join("=")).join("&");
}

function wait(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("aborted", "AbortError"));
    });
  });
}

async function request(name, params, { signal, onPending } = {}) {
  const text = query(params);
  for (;;) {
    const response = await fetch(`api/${name}${text ? "?" + text : ""}`, { signal });
    if (response.status === 202) {
      onPending?.((await response.json()).pending);
      await wait(POLL_MILLISECONDS, signal);
      continue;
    }
    if (!response.ok) throw new ApiError(await errorOf(response));
    return response;
  }
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function fromFile(name, params) {
  const key = name + "?" + query(params);
  const file = window.SNCLR_FILES[key];
  if (file === undefined) throw new ApiError("This folder does not have that. Start snclr explore RUN for it.");
  if (!chunks.has(file)) {
    chunks.set(
      file,
      new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${file}.js`;
        script.onload = () => resolve(window.SNCLR_DATA[file]);
        script.onerror = () => reject(new ApiError(`data/${file}.js is missing`));
        document.head.append(script);
      }),
    );
  }
  return chunks.get(file).then((chunk) => {
    const value = chunk[key];
    if (value?.error) throw new ApiError(value.error);
    return value;
  });
}

export async function get(name, params = {}, options = {}) {
  if (isStatic) return fromFile(name, params);
  return (await request(name, params, options)).json();
}

// A float32 array.
export async function floats(name, params = {}, options = {}) {
  if (isStatic) {
    const text = atob((await fromFile(name, params)).base64);
    return new Float32Array(Uint8Array.from(text, (c) => c.charCodeAt(0)).buffer);
  }
  return new Float32Array(await (await request(name, params, options)).arrayBuffer());
}

export async function post(name, body, headers = {}) {
  const response = await fetch(`api/${name}`, { method: "POST", body, headers });
  if (!response.ok) throw new ApiError(await errorOf(response));
  return response;
}

export function imageUrl(image, side = 96) {
  if (isStatic) return `images/${image.set}/${image.id}.jpg`;
  return `image/${image.set}/${image.id}?side=${side}`;
}
