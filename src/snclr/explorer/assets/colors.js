// Colors of points: a hue for each class or cluster, a ramp for quantities.

const HUES = ["#3b7dd8", "#e8833a", "#2fa35b", "#d94f4f", "#8d63c9", "#9a6b4b", "#dd72b4", "#1fa3a3", "#a3a32a", "#58b4e8", "#d9ae1f", "#7cb82f"];
const RAMP = ["#3d3a8c", "#3b6fb0", "#2a9d8f", "#7fc15e", "#f2cf3b"].map(rgb);
const UNKNOWN = [152, 161, 171];

function rgb(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

export function hue(index) {
  if (index < HUES.length) return HUES[index];
  const angle = (index * 137.508) % 360;
  return `hsl(${angle.toFixed(0)} 55% 52%)`;
}

function hueBytes(index) {
  if (index < HUES.length) return rgb(HUES[index]);
  const [angle, s, l] = [(index * 137.508) % 360, 0.55, 0.52];
  const f = (n) => {
    const k = (n + angle / 30) % 12;
    return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [f(0), f(8), f(4)];
}

export function ramp(share) {
  const at = Math.max(0, Math.min(0.9999, share)) * (RAMP.length - 1);
  const [low, high] = [RAMP[Math.floor(at)], RAMP[Math.floor(at) + 1]];
  return low.map((value, i) => Math.round(value + (high[i] - value) * (at % 1)));
}

export function rampCss() {
  return `linear-gradient(90deg, ${RAMP.map((c) => `rgb(${c})`).join(", ")})`;
}

// Bytes RGBA (4n) for values (n); `hidden` are the values to fade.
export function categorical(values, hidden = new Set()) {
  const colors = new Uint8Array(4 * values.length);
  for (let i = 0; i < values.length; i++) {
    const known = !Number.isNaN(values[i]);
    colors.set(known ? hueBytes(values[i]) : UNKNOWN, 4 * i);
    colors[4 * i + 3] = known && hidden.has(values[i]) ? 26 : 255;
  }
  return colors;
}

export function continuous(values) {
  const finite = Float32Array.from(values.filter((value) => !Number.isNaN(value))).sort();
  const low = finite[Math.floor(finite.length * 0.01)] ?? 0;
  const high = finite[Math.min(finite.length - 1, Math.floor(finite.length * 0.99))] ?? 1;
  const colors = new Uint8Array(4 * values.length);
  for (let i = 0; i < values.length; i++) {
    const known = !Number.isNaN(values[i]);
    colors.set(known ? ramp((values[i] - low) / (high - low || 1)) : UNKNOWN, 4 * i);
    colors[4 * i + 3] = known ? 255 : 90;
  }
  return { colors, low, high };
}
