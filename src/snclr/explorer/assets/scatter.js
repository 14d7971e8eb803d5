// A WebGL scatter plot: pan, zoom, lasso, transitions; images replace dots when few are in view.

import { imageUrl } from "./api.js";
import { h } from "./dom.js";

const VERTEX = `
attribute vec2 a; attribute vec2 b; attribute vec4 color;
uniform vec2 scale; uniform vec2 offset; uniform float mixture; uniform float size;
varying vec4 tint;
void main() {
  vec2 p = mix(a, b, mixture) * scale + offset;
  gl_Position = vec4(p, 0.0, 1.0);
  gl_PointSize = size * (color.a > 0.98 ? 1.0 : 0.8);
  tint = color;
}`;
const FRAGMENT = `
precision mediump float;
varying vec4 tint;
uniform float round;
void main() {
  if (round > 0.5 && length(gl_PointCoord - 0.5) > 0.5) discard;
  gl_FragColor = vec4(tint.rgb * tint.a, tint.a);
}`;
const MAX_IMAGES = 400;
const IMAGE_CACHE = 900;
const MARGIN = 0.9;
// With this many points, a pan or zoom moves the drawn canvas; the points are drawn again when it ends. The canvas is
// larger than the stage by EDGE of its size on each side.
const LARGE = 20000;
const EDGE = 0.3;
const SETTLE_MILLISECONDS = 140;

export class Scatter {
  // `imageOf(row)` describes the image of a point; onHover(row), onSelect(row), onLasso(rows); row is -1 for none.
  // `inset()` is the width on the left that a panel covers.
  constructor(container, { imageOf, onHover, onSelect, onLasso, inset = () => 0 }) {
    Object.assign(this, { container, imageOf, onHover, onSelect, onLasso, inset });
    this.canvas = h("canvas", { class: "points" });
    this.overlay = h("canvas", { class: "overlay", tabindex: "0", "aria-label": "Map of the images. Arrow keys pan, plus and minus zoom." });
    container.append(this.canvas, this.overlay);
    this.gl = this.canvas.getContext("webgl", { antialias: false, alpha: true, premultipliedAlpha: true, powerPreference: "high-performance" });
    if (!this.gl) throw new Error("The map needs WebGL, which this browser does not offer.");
    this.context = this.overlay.getContext("2d");
    this.count = 0;
    this.scale = 1;
    this.left = 0;
    this.view = { x: 0, y: 0, zoom: 1 };
    this.images = new Map();
    this.lines = [];
    this.marked = new Set();
    this.lasso = null;
    this.lassoMode = false;
    this.focus = -1;
    this.mixture = 1;
    this.pointers = new Map();
    this.setUp();
    this.listen();
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(container);
    this.resize();
  }

  setUp() {
    const gl = this.gl;
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    gl.useProgram(program);
    this.at = {};
    for (const name of ["a", "b", "color"]) this.at[name] = gl.getAttribLocation(program, name);
    for (const name of ["scale", "offset", "mixture", "size", "round"]) this.at[name] = gl.getUniformLocation(program, name);
    this.buffers = { a: gl.createBuffer(), b: gl.createBuffer(), color: gl.createBuffer() };
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  attribute(name, data, size, type, normalized) {
    const gl = this.gl;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
    gl.bufferData(gl.ARRAY_BUFFER, data, gl.STATIC_DRAW);
    gl.enableVertexAttribArray(this.at[name]);
    gl.vertexAttribPointer(this.at[name], size, type, normalized, 0, 0);
  }

  // Points (2n) in any unit; `animate` moves the points from where they are.
  setPoints(points, { animate = false, fit = true } = {}) {
    const before = animate && this.points?.length === points.length ? this.points : null;
    this.points = points;
    this.count = points.length / 2;
    const gl = this.gl;
    this.attribute("a", before ?? points, 2, gl.FLOAT, false);
    this.attribute("b", points, 2, gl.FLOAT, false);
    if (!this.colors || this.colors.length !== 4 * this.count) this.setColors(new Uint8Array(4 * this.count).fill(160));
    if (fit) this.bounds = boundsOf(points);
    if (fit) this.fit(false);
    this.index = null;
    if (before) this.animate();
    else {
      this.mixture = 1;
      this.draw();
    }
  }

  setColors(colors) {
    this.colors = colors;
    this.attribute("color", colors, 4, this.gl.UNSIGNED_BYTE, true);
    this.draw();
  }

  animate() {
    const start = performance.now();
    const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const step = (now) => {
      const t = reduced ? 1 : Math.min(1, (now - start) / 600);
      this.mixture = t * t * (3 - 2 * t);
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  // The grid that finds points near the pointer.
  grid() {
    if (this.index) return this.index;
    const [left, top, right, bottom] = boundsOf(this.points);
    const cells = Math.max(1, Math.min(400, Math.ceil(Math.sqrt(this.count / 3))));
    const width = (right - left) / cells || 1;
    const height = (bottom - top) / cells || 1;
    const cell = (row) => {
      const x = Math.min(cells - 1, Math.floor((this.points[2 * row] - left) / width));
      const y = Math.min(cells - 1, Math.floor((this.points[2 * row + 1] - top) / height));
      return y * cells + x;
    };
    const starts = new Uint32Array(cells * cells + 1);
    for (let row = 0; row < this.count; row++) starts[cell(row) + 1]++;
    for (let i = 0; i < cells * cells; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    const rows = new Uint32Array(this.count);
    for (let row = 0; row < this.count; row++) rows[next[cell(row)]++] = row;
    this.index = { left, top, width, height, cells, starts, rows };
    return this.index;
  }

  // The rows in a rectangle of data coordinates, at most `limit`; null if there are more.
  within(x0, y0, x1, y1, limit = Infinity) {
    const { left, top, width, height, cells, starts, rows } = this.grid();
    const clamp = (value) => Math.min(cells - 1, Math.max(0, Math.floor(value)));
    const found = [];
    for (let y = clamp((y0 - top) / height); y <= clamp((y1 - top) / height); y++) {
      const from = starts[y * cells + clamp((x0 - left) / width)];
      const to = starts[y * cells + clamp((x1 - left) / width) + 1];
      for (let i = from; i < to; i++) {
        const row = rows[i];
        const x = this.points[2 * row];
        const v = this.points[2 * row + 1];
        if (x >= x0 && x <= x1 && v >= y0 && v <= y1) found.push(row);
        if (found.length > limit) return null;
      }
    }
    return found;
  }

  // Coordinates

  // Pixels per data unit.
  unit() {
    return this.scale * this.view.zoom;
  }

  get centerX() {
    return (this.width + this.left) / 2;
  }

  toScreen(row) {
    const unit = this.unit();
    return [this.centerX + (this.points[2 * row] - this.view.x) * unit, this.height / 2 - (this.points[2 * row + 1] - this.view.y) * unit];
  }

  toData(x, y) {
    const unit = this.unit();
    return [this.view.x + (x - this.centerX) / unit, this.view.y - (y - this.height / 2) / unit];
  }

  fit(draw = true) {
    const [left, top, right, bottom] = this.bounds ?? [0, 0, 1, 1];
    const [width, height] = [Math.max(1, this.width - this.left), Math.max(1, this.height)];
    this.rendered = null;
    this.scale = MARGIN * Math.min(width / Math.max(right - left, 1e-9), height / Math.max(bottom - top, 1e-9));
    this.view = { x: (left + right) / 2, y: (top + bottom) / 2, zoom: 1 };
    if (draw) this.draw();
  }

  zoomAt(x, y, factor) {
    const [dataX, dataY] = this.toData(x, y);
    this.move();
    this.view.zoom = Math.min(4000, Math.max(0.3, this.view.zoom * factor));
    const unit = this.unit();
    this.view.x = dataX - (x - this.centerX) / unit;
    this.view.y = dataY + (y - this.height / 2) / unit;
    this.draw();
  }

  pan(dx, dy) {
    const unit = this.unit();
    this.move();
    this.view.x -= dx / unit;
    this.view.y += dy / unit;
    this.draw();
  }

  move() {
    this.moving = true;
    clearTimeout(this.settling);
    this.settling = setTimeout(() => {
      this.moving = false;
      this.draw();
    }, SETTLE_MILLISECONDS);
  }

  // Drawing

  resize() {
    const { width, height } = this.container.getBoundingClientRect();
    if (!width || !height) return;
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    Object.assign(this, { width, height, left: this.inset() });
    const size = 1 + 2 * EDGE;
    for (const [canvas, scale] of [[this.canvas, size], [this.overlay, 1]]) {
      canvas.width = Math.round(width * scale * this.ratio);
      canvas.height = Math.round(height * scale * this.ratio);
    }
    Object.assign(this.canvas.style, { left: `${-EDGE * width}px`, top: `${-EDGE * height}px`, width: `${size * width}px`, height: `${size * height}px` });
    this.rendered = null;
    if (this.bounds && this.view.zoom === 1) this.fit(false);
    this.draw();
  }

  draw() {
    if (this.scheduled) return;
    this.scheduled = requestAnimationFrame(() => {
      this.scheduled = null;
      if (this.moving && this.slide()) this.drawOverlay();
      else this.render();
    });
  }

  // Move and scale the canvas as it was drawn to the current view; false if it does not cover the stage.
  slide() {
    const { rendered, view, width, height } = this;
    if (!rendered || this.count < LARGE || this.mixture < 1) return false;
    const unit = this.unit();
    const s = view.zoom / rendered.zoom;
    const x = (rendered.x - view.x) * unit;
    const y = (view.y - rendered.y) * unit;
    const covers = (center, size, shift) => center - (EDGE * size + center) * s + shift <= 0 && center + (size + EDGE * size - center) * s + shift >= size;
    if (s > 2 || !covers(this.centerX, width, x) || !covers(height / 2, height, y)) return false;
    this.canvas.style.transformOrigin = `${EDGE * width + this.centerX}px ${EDGE * height + height / 2}px`;
    this.canvas.style.transform = `translate(${x}px, ${y}px) scale(${s})`;
    return true;
  }

  render() {
    if (!this.count || !this.width) return;
    const gl = this.gl;
    const unit = this.unit();
    gl.viewport(0, 0, this.canvas.width, this.canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    const size = 1 + 2 * EDGE;
    const sx = (2 * unit) / (this.width * size);
    const sy = (2 * unit) / (this.height * size);
    const middle = (2 * (EDGE * this.width + this.centerX)) / (this.width * size) - 1;
    gl.uniform2f(this.at.scale, sx, sy);
    gl.uniform2f(this.at.offset, -this.view.x * sx + middle, -this.view.y * sy);
    gl.uniform1f(this.at.mixture, this.mixture);
    const base = this.count > 50000 ? 2 : this.count > 8000 ? 3 : this.count > 1500 ? 4.5 : 7;
    const dot = Math.min(14, base * Math.pow(this.view.zoom, 0.25)) * this.ratio;
    gl.uniform1f(this.at.size, dot);
    gl.uniform1f(this.at.round, dot > 3 ? 1 : 0);
    gl.drawArrays(gl.POINTS, 0, this.count);
    this.canvas.style.transform = "";
    this.rendered = { ...this.view };
    this.drawOverlay();
  }

  drawOverlay() {
    const context = this.context;
    const needed = this.mixture === 1 && (this.showsImages() || this.lines.length || this.marked.size || this.lasso || this.focus >= 0);
    if (!needed && !this.dirty) return;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.dirty = needed;
    if (!needed) return;
    const style = getComputedStyle(this.container);
    const accent = style.getPropertyValue("--accent");
    this.drawImages(context, style);
    if (this.focus >= 0 && this.lines.length) {
      const [x, y] = this.toScreen(this.focus);
      context.strokeStyle = accent;
      context.globalAlpha = 0.75;
      context.lineWidth = 1.5;
      context.beginPath();
      for (const row of this.lines) {
        context.moveTo(x, y);
        context.lineTo(...this.toScreen(row));
      }
      context.stroke();
      context.globalAlpha = 1;
    }
    context.lineWidth = 2;
    context.strokeStyle = accent;
    for (const row of this.lines) this.ring(context, row, 5);
    if (this.marked.size < 4000) {
      context.lineWidth = 1.5;
      for (const row of this.marked) this.ring(context, row, 4);
    }
    if (this.focus >= 0) {
      context.lineWidth = 3;
      context.strokeStyle = style.getPropertyValue("--ink");
      this.ring(context, this.focus, 8);
    }
    if (this.lasso) {
      context.strokeStyle = accent;
      context.fillStyle = accent;
      context.lineWidth = 1.5;
      context.beginPath();
      this.lasso.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.closePath();
      context.stroke();
      context.globalAlpha = 0.12;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  ring(context, row, radius) {
    const [x, y] = this.toScreen(row);
    if (x < -20 || y < -20 || x > this.width + 20 || y > this.height + 20) return;
    context.beginPath();
    context.arc(x, y, radius, 0, 7);
    context.stroke();
  }

  showsImages() {
    if (this.view.zoom < 1.2 && this.count > MAX_IMAGES) return false;
    const [x0, y1] = this.toData(0, 0);
    const [x1, y0] = this.toData(this.width, this.height);
    this.inView = this.within(x0, y0, x1, y1, MAX_IMAGES);
    return this.inView !== null && this.inView.length > 0;
  }

  drawImages(context, style) {
    if (!this.inView || !this.showsImages()) return;
    const side = Math.max(22, Math.min(72, Math.sqrt((this.width * this.height) / (this.inView.length + 6)) * 0.42));
    context.lineWidth = 2;
    for (const row of this.inView) {
      const [x, y] = this.toScreen(row);
      const picture = this.picture(row);
      const c = 4 * row;
      if (picture.complete && picture.naturalWidth) {
        const scale = side / Math.max(picture.naturalWidth, picture.naturalHeight);
        const [w, v] = [picture.naturalWidth * scale, picture.naturalHeight * scale];
        context.imageSmoothingEnabled = picture.naturalWidth > 64;
        context.drawImage(picture, x - w / 2, y - v / 2, w, v);
        context.strokeStyle = `rgb(${this.colors[c]},${this.colors[c + 1]},${this.colors[c + 2]})`;
        context.strokeRect(x - w / 2, y - v / 2, w, v);
      }
    }
    context.strokeStyle = style.getPropertyValue("--ink");
  }

  picture(row) {
    let picture = this.images.get(row);
    if (!picture) {
      picture = new Image();
      picture.onload = () => this.draw();
      picture.src = imageUrl(this.imageOf(row), 96);
      this.images.set(row, picture);
      if (this.images.size > IMAGE_CACHE) this.images.delete(this.images.keys().next().value);
    }
    return picture;
  }

  // Input

  nearest(x, y, radius = 14) {
    if (!this.count) return -1;
    const [x0, y1] = this.toData(x - radius, y - radius);
    const [x1, y0] = this.toData(x + radius, y + radius);
    let best = -1;
    let closest = radius * radius;
    for (const row of this.within(x0, y0, x1, y1) ?? []) {
      const [px, py] = this.toScreen(row);
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < closest) [best, closest] = [row, distance];
    }
    return best;
  }

  listen() {
    const area = this.overlay;
    const place = (event) => {
      const { left, top } = area.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    };
    let moved = 0;
    area.addEventListener("pointerdown", (event) => {
      area.setPointerCapture(event.pointerId);
      this.onHover?.(-1, [0, 0]);
      this.pointers.set(event.pointerId, place(event));
      moved = 0;
      if (this.pointers.size === 1 && (event.shiftKey || this.lassoMode)) this.lasso = [place(event)];
      else this.lasso = null;
    });
    area.addEventListener("pointermove", (event) => {
      const to = place(event);
      const from = this.pointers.get(event.pointerId);
      if (!from) {
        if (event.pointerType !== "touch") this.onHover?.(this.nearest(...to), to);
        return;
      }
      moved += Math.abs(to[0] - from[0]) + Math.abs(to[1] - from[1]);
      if (this.pointers.size === 2) {
        const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
        const before = Math.hypot(from[0] - other[0], from[1] - other[1]);
        const after = Math.hypot(to[0] - other[0], to[1] - other[1]);
        this.zoomAt((to[0] + other[0]) / 2, (to[1] + other[1]) / 2, after / Math.max(before, 1));
      } else if (this.lasso) {
        this.lasso.push(to);
        this.draw();
      } else this.pan(to[0] - from[0], to[1] - from[1]);
      this.pointers.set(event.pointerId, to);
    });
    const end = (event) => {
      if (!this.pointers.delete(event.pointerId)) return;
      if (this.lasso) {
        const path = this.lasso;
        this.lasso = null;
        this.dirty = true;
        if (path.length > 3) this.onLasso?.(this.enclosed(path));
        this.draw();
      } else if (moved < 5 && event.type === "pointerup") this.onSelect?.(this.nearest(...place(event)));
    };
    area.addEventListener("pointerup", end);
    area.addEventListener("pointercancel", end);
    area.addEventListener("pointerleave", () => this.onHover?.(-1, [0, 0]));
    area.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomAt(...place(event), Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)));
    }, { passive: false });
  }

  key(event) {
    const center = [this.centerX, this.height / 2];
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.key === "+" || event.key === "=") this.zoomAt(...center, 1.4);
    else if (event.key === "-") this.zoomAt(...center, 1 / 1.4);
    else if (event.key === "0") this.fit();
    else if (moves[event.key] && document.activeElement === this.overlay) this.pan(...moves[event.key]);
    else return false;
    return true;
  }

  enclosed(path) {
    const xs = path.map(([x]) => x);
    const ys = path.map(([, y]) => y);
    const [x0, y1] = this.toData(Math.min(...xs), Math.min(...ys));
    const [x1, y0] = this.toData(Math.max(...xs), Math.max(...ys));
    return this.within(x0, y0, x1, y1).filter((row) => {
      const [x, y] = this.toScreen(row);
      let inside = false;
      for (let i = 0, j = path.length - 1; i < path.length; j = i++) {
        const [ax, ay] = path[i];
        const [bx, by] = path[j];
        if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
      }
      return inside;
    });
  }

  destroy() {
    this.resizing.disconnect();
    if (this.scheduled) cancelAnimationFrame(this.scheduled);
    clearTimeout(this.settling);
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
  }
}

// The box around the points without the outermost 0.2 % of each side.
function boundsOf(points) {
  const n = points.length / 2;
  if (n < 500) {
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    for (let i = 0; i < n; i++) {
      left = Math.min(left, points[2 * i]);
      right = Math.max(right, points[2 * i]);
      top = Math.min(top, points[2 * i + 1]);
      bottom = Math.max(bottom, points[2 * i + 1]);
    }
    return [left, top, right, bottom];
  }
  const range = (axis) => {
    const values = new Float32Array(n);
    for (let i = 0; i < n; i++) values[i] = points[2 * i + axis];
    values.sort();
    return [values[Math.floor(n * 0.002)], values[Math.ceil(n * 0.998) - 1]];
  };
  const [left, right] = range(0);
  const [top, bottom] = range(1);
  return [left, top, right, bottom];
}
