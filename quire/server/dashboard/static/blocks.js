// The map of the KV cache. Blocks are ordered by the requests that hold them, or by their physical
// number; a cell stands for one block, or for several blocks in a row where there are too many to see.

import { byId, colour, count, legendEntry, percent } from "./dom.js";

const [FREE, CACHED, OWNED, SHARED, OWNED_NEXT] = [0, 1, 2, 3, 4];
const NAMES = ["free", "cached", "owned", "shared", "owned"];
const COLOURS = ["free", "cached", "owned", "shared", "owned-next"];
const LAYERS = [SHARED, OWNED, OWNED_NEXT, CACHED, FREE]; // of a cell with several states, from the top
const MOST_HEIGHT = 220;
const LARGEST = 18;
const SMALLEST = 9;

// Four states to a byte, the first in the lowest bits.
export function unpack(text, size) {
  const packed = atob(text);
  const states = new Uint8Array(size);
  for (let i = 0; i < size; i += 1) {
    states[i] = (packed.charCodeAt(i >> 2) >> ((i & 3) * 2)) & 3;
  }
  return states;
}

// One entry for each block in the order of the map: its state, the request that holds it (its place
// in the list, or -1), its physical number (-1 where only the owner is known), whether it is marked.
class Layout {
  constructor(size) {
    this.states = new Uint8Array(size);
    this.owners = new Int32Array(size).fill(-1);
    this.blocks = new Int32Array(size).fill(-1);
    this.marked = new Uint8Array(size);
  }

  get size() {
    return this.states.length;
  }
}

function byNumber(states, chosen) {
  const layout = new Layout(states.length);
  layout.states.set(states);
  for (let i = 0; i < states.length; i += 1) layout.blocks[i] = i;
  for (const block of chosen.blocks) layout.marked[block] = 1;
  return layout;
}

// Shared blocks first, then each request's own ones, then what only the cache holds, then free ones.
function byOwner(states, sizes, sequences, chosen) {
  const layout = new Layout(states.length);
  const table = new Set(chosen.blocks);
  let [at, band] = [0, 0];
  const put = (state, owner, block, marked) => {
    layout.states[at] = state;
    layout.owners[at] = owner;
    layout.blocks[at] = block;
    layout.marked[at] = marked;
    at += 1;
  };
  const putAll = (state) => {
    states.forEach((own, block) => own === state && put(state, -1, block, table.has(block)));
  };
  putAll(SHARED);
  const end = at + sizes[OWNED];
  sequences.forEach((one, place) => {
    const isChosen = one.key === chosen.key;
    const own = isChosen ? chosen.blocks.filter((block) => states[block] === OWNED) : [];
    const last = Math.min(at + one.num_owned_blocks, end);
    if (at < last) band += 1;
    for (let i = 0; at < last; i += 1) put(band % 2 ? OWNED : OWNED_NEXT, place, own[i] ?? -1, isChosen);
  });
  while (at < end) put(band % 2 ? OWNED_NEXT : OWNED, -1, -1, false); // of requests that are not listed
  putAll(CACHED);
  putAll(FREE);
  return layout;
}

export class BlockMap {
  // `onPoint` is called with the words for what is under the pointer, or null.
  constructor(canvas, onPoint) {
    this.canvas = canvas;
    this.isByOwner = true;
    this.layout = new Layout(0);
    this.sequences = [];
    this.perCell = 1;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("mousemove", (event) => onPoint(this._describe(this._cellAt(event))));
    canvas.addEventListener("mouseleave", () => onPoint(null));
  }

  // `sequences`: with their names and how many blocks each alone holds; `chosen`: the block table
  // of one of them.
  show(states, sequences, chosen) {
    const sizes = [0, 0, 0, 0];
    for (const state of states) sizes[state] += 1;
    this.states = states;
    this.sequences = sequences;
    this.layout = this.isByOwner
      ? byOwner(states, sizes, sequences, chosen)
      : byNumber(states, chosen);
    this.draw();
    byId("legend").replaceChildren(
      ...sizes.map((size, i) =>
        legendEntry(COLOURS[i], NAMES[i], `${count(size)} · ${percent(size / states.length)}`),
      ),
    );
  }

  stateOf(block) {
    return NAMES[this.states[block]];
  }

  get note() {
    const cell = this.perCell === 1 ? "one block" : `${this.perCell} blocks`;
    const order = this.isByOwner
      ? "shared blocks first, then each request's own in two shades, then cached and free ones"
      : "in the order of their physical numbers";
    return `Each square is ${cell}: ${order}. Point at a request to see its blocks.`;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.layout.size || !width) return;
    this._measure(width);
    const scale = window.devicePixelRatio || 1;
    const cells = Math.ceil(this.layout.size / this.perCell);
    const rows = Math.ceil(cells / this.columns);
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(rows * this.cell * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${rows * this.cell}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const shades = COLOURS.map(colour);
    const ring = colour("marked");
    for (let cell = 0; cell < cells; cell += 1) this._drawCell(context, cell, shades, ring);
  }

  // The fewest blocks to a cell with which all cells fit; a power of two, so that it changes rarely.
  _measure(width) {
    const most = Math.floor(width / SMALLEST) * Math.floor(MOST_HEIGHT / SMALLEST);
    this.perCell = 1;
    while (this.layout.size / this.perCell > Math.max(most, 1)) this.perCell *= 2;
    const cells = Math.ceil(this.layout.size / this.perCell);
    const fitting = Math.floor(Math.sqrt((width * MOST_HEIGHT) / cells));
    this.cell = Math.min(LARGEST, Math.max(SMALLEST, fitting));
    this.columns = Math.max(1, Math.floor(width / this.cell));
  }

  // Layers as high as the states' shares of the cell, and a ring where a block of it is marked.
  _drawCell(context, cell, shades, ring) {
    const { counts, size, marked } = this._contents(cell);
    const x = (cell % this.columns) * this.cell;
    const top = Math.floor(cell / this.columns) * this.cell;
    const side = this.cell - 1; // the rest is the gap
    let below = 0;
    for (const state of LAYERS) {
      if (!counts[state]) continue;
      const y = Math.round((below / size) * side);
      below += counts[state];
      context.fillStyle = shades[state];
      context.fillRect(x, top + y, side, Math.round((below / size) * side) - y);
    }
    if (!marked) return;
    const line = Math.max(2, Math.round(this.cell / 7));
    context.strokeStyle = ring;
    context.lineWidth = line;
    context.strokeRect(x + line / 2, top + line / 2, side - line, side - line);
  }

  _contents(cell) {
    const first = cell * this.perCell;
    const end = Math.min(first + this.perCell, this.layout.size);
    const counts = [0, 0, 0, 0, 0];
    let marked = 0;
    for (let i = first; i < end; i += 1) {
      counts[this.layout.states[i]] += 1;
      marked += this.layout.marked[i];
    }
    return { first, end, counts, size: end - first, marked };
  }

  _cellAt(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const cell = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return column < this.columns && cell * this.perCell < this.layout.size ? cell : null;
  }

  _describe(cell) {
    if (cell === null) return null;
    const { first, end, counts, size } = this._contents(cell);
    counts[OWNED] += counts[OWNED_NEXT];
    const [state, block] = [this.layout.states[first], this.layout.blocks[first]];
    const what = [SHARED, OWNED, CACHED, FREE]
      .filter((each) => counts[each])
      .map((each) => (counts[each] === size ? NAMES[each] : `${count(counts[each])} ${NAMES[each]}`))
      .join(", ");
    const holders = new Set(this.layout.owners.subarray(first, end));
    holders.delete(-1);
    const names = [...holders].map((place) => this.sequences[place].name);
    const by = names.length ? `, held by ${names.slice(0, 3).join(", ")}` : "";
    const more = names.length > 3 ? ` and ${names.length - 3} more` : "";
    if (size === 1) return `${block < 0 ? "A block" : `Block ${count(block)}`}: ${NAMES[state]}${by}.`;
    const numbers = this.isByOwner ? `${size} blocks` : `Blocks ${count(first)} to ${count(end - 1)}`;
    return `${numbers}: ${what}${by}${more}.`;
  }
}
