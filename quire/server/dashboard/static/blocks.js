// The map of physical blocks: one square each, however many there are.

import { byId, colour, count, legendEntry, percent } from "./dom.js";

const STATES = [
  { name: "free", colour: "free" },
  { name: "cached", colour: "cached" },
  { name: "owned", colour: "owned" },
  { name: "shared", colour: "shared" },
];
const MOST_HEIGHT = 220;
const LARGEST = 18;
const SMALLEST = 3;
const WITH_GAPS = 5;

// Four states to a byte, the first in the lowest bits.
export function unpack(text, size) {
  const packed = atob(text);
  const states = new Uint8Array(size);
  for (let i = 0; i < size; i += 1) {
    states[i] = (packed.charCodeAt(i >> 2) >> ((i & 3) * 2)) & 3;
  }
  return states;
}

export class BlockMap {
  constructor(canvas, onPoint) {
    this.canvas = canvas;
    this.states = new Uint8Array(0);
    this.marked = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("mousemove", (event) => onPoint(this._at(event)));
    canvas.addEventListener("mouseleave", () => onPoint(null));
  }

  show(states, marked) {
    this.states = states;
    this.marked = marked;
    this.draw();
    const sizes = [0, 0, 0, 0];
    for (const state of states) sizes[state] += 1;
    byId("legend").replaceChildren(
      ...STATES.map(({ name, colour: own }, i) =>
        legendEntry(own, name, `${count(sizes[i])} · ${percent(sizes[i] / states.length)}`),
      ),
    );
    return sizes;
  }

  stateOf(block) {
    return STATES[this.states[block]].name;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    const size = this.states.length;
    if (!size || !width) return;
    const scale = window.devicePixelRatio || 1;
    const fitting = Math.floor(Math.sqrt((width * MOST_HEIGHT) / size));
    this.cell = Math.min(LARGEST, Math.max(SMALLEST, fitting));
    this.columns = Math.floor(width / this.cell);
    const rows = Math.ceil(size / this.columns);
    const pixels = Math.round(this.cell * scale);
    this.canvas.width = this.columns * pixels;
    this.canvas.height = rows * pixels;
    this.canvas.style.width = `${this.columns * this.cell}px`;
    this.canvas.style.height = `${rows * this.cell}px`;
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(this._picture(rows), 0, 0, this.canvas.width, this.canvas.height);
    if (this.cell < WITH_GAPS) return;
    const gap = Math.ceil(scale);
    this._gaps(context, rows, pixels, gap);
    this._rings(context, pixels, gap);
  }

  // One pixel for each block, which the canvas enlarges: quick for any number of them.
  _picture(rows) {
    const shades = [...STATES.map((state) => state.colour), "marked"].map((name) => rgb(colour(name)));
    const image = new ImageData(this.columns, rows);
    this.states.forEach((state, i) => image.data.set(shades[state], i * 4));
    if (this.cell < WITH_GAPS) {
      for (const block of this.marked) image.data.set(shades[4], block * 4);
    }
    const small = new OffscreenCanvas(this.columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
  }

  _gaps(context, rows, pixels, gap) {
    context.fillStyle = colour("card");
    for (let x = 1; x <= this.columns; x += 1) {
      context.fillRect(x * pixels - gap, 0, gap, this.canvas.height);
    }
    for (let y = 1; y <= rows; y += 1) {
      context.fillRect(0, y * pixels - gap, this.canvas.width, gap);
    }
  }

  // Marked blocks keep the colour of their state where there is room for a ring around it.
  _rings(context, pixels, gap) {
    const width = Math.max(2, Math.round(pixels / 7));
    context.strokeStyle = colour("marked");
    context.lineWidth = width;
    for (const block of this.marked) {
      const x = (block % this.columns) * pixels;
      const y = Math.floor(block / this.columns) * pixels;
      context.strokeRect(x + width / 2, y + width / 2, pixels - gap - width, pixels - gap - width);
    }
  }

  _at(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const block = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return column < this.columns && block < this.states.length ? block : null;
  }
}

function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255, 255];
}
