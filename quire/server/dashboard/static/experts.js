// The map of experts: a line for each layer that has some, a column for each expert, the stronger the
// more tokens it got since the last look.

import { byId, colour, count, percent, setText } from "./dom.js";

const MOST_HEIGHT = 240;
const LARGEST = 14;
const FULL = 3; // times the mean of the layer: as strong as it gets
const BINS = 8; // shades

export class ExpertMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.last = null;
    this.gained = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("mousemove", (event) => this._note(this._cellAt(event)));
    canvas.addEventListener("mouseleave", () => this._note(null));
  }

  // `counts`: the reply of `/dashboard/experts`.
  show(counts) {
    this.layers = counts.layers;
    const since = this.last && this.last.num_steps < counts.num_steps ? this.last : null;
    const differences = counts.tokens.map((line, i) =>
      line.map((tokens, j) => tokens - (since ? since.tokens[i][j] : 0)),
    );
    // Where nothing ran meanwhile the map stays as it is; a new engine counts from 0.
    if (!this.last || this.last.num_steps !== counts.num_steps) this.gained = differences;
    this.last = counts;
    const mean = counts.used_per_step.reduce((sum, used) => sum + used, 0) / counts.layers.length;
    byId("experts-card").hidden = false;
    setText("experts-size", `${counts.layers.length} layers of ${counts.tokens[0].length}`);
    setText("experts-used", mean.toFixed(1));
    setText("experts-busiest", percent(Math.max(...this.gained.map(busiestShare))));
    this._note(null);
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.gained.length || !width) return;
    const [rows, columns] = [this.gained.length, this.gained[0].length];
    this.cellWidth = Math.min(LARGEST, width / columns);
    this.cellHeight = Math.min(LARGEST, Math.max(2, MOST_HEIGHT / rows));
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.cellWidth * columns * scale);
    this.canvas.height = Math.round(this.cellHeight * rows * scale);
    this.canvas.style.width = `${this.cellWidth * columns}px`;
    this.canvas.style.height = `${this.cellHeight * rows}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = colour("free");
    context.fillRect(0, 0, this.cellWidth * columns, this.cellHeight * rows);
    context.fillStyle = colour("owned");
    this.gained.forEach((line, row) => {
      const mean = line.reduce((sum, tokens) => sum + tokens, 0) / columns;
      line.forEach((tokens, column) => {
        if (!tokens) return;
        context.globalAlpha = Math.ceil((BINS * Math.min(tokens / mean, FULL)) / FULL) / BINS;
        const [x, y] = [column * this.cellWidth, row * this.cellHeight];
        context.fillRect(x, y, this.cellWidth, this.cellHeight);
      });
    });
  }

  _cellAt(event) {
    const row = Math.floor(event.offsetY / this.cellHeight);
    const column = Math.floor(event.offsetX / this.cellWidth);
    return this.gained[row]?.[column] === undefined ? null : { row, column };
  }

  _note(cell) {
    if (cell === null) {
      setText("experts-note", "A line for each layer, a column for each expert, by tokens of late.");
      return;
    }
    const { row, column } = cell;
    const total = this.last.tokens[row].reduce((sum, tokens) => sum + tokens, 0);
    const own = this.last.tokens[row][column];
    setText(
      "experts-note",
      `Layer ${this.layers[row]}, expert ${column}: ${count(this.gained[row][column])} tokens of ` +
        `late, ${count(own)} in all (${percent(own / (total || 1))} of the layer).`,
    );
  }
}

function busiestShare(line) {
  const total = line.reduce((sum, tokens) => sum + tokens, 0);
  return total ? Math.max(...line) / total : 0;
}
