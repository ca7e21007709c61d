// Small charts of the last minute. A value of null is a gap.

import { colour } from "./dom.js";

const SPAN = 60; // points, one for each look at the engine

export class Chart {
  // `lines` are the names of colours, the first one drawn on top.
  constructor(canvas, lines, format) {
    this.canvas = canvas;
    this.lines = lines.map((name) => ({ name, values: [] }));
    this.format = format;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add(...values) {
    this.lines.forEach((line, i) => {
      line.values.push(values[i]);
      if (line.values.length > SPAN) line.values.shift();
    });
    this.draw();
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const most = Math.max(0, ...this.lines.flatMap((line) => line.values));
    this._base(context, width, height, most);
    for (const line of [...this.lines].reverse()) {
      this._line(context, line, width, height, most || 1, line === this.lines[0]);
    }
  }

  _base(context, width, height, most) {
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(0, height - 0.5);
    context.lineTo(width, height - 0.5);
    context.stroke();
    if (most) {
      context.fillStyle = colour("muted");
      context.font = "10px system-ui, sans-serif";
      context.textAlign = "right";
      context.fillText(this.format(most), width, 9);
    }
  }

  _line(context, { name, values }, width, height, most, filled) {
    const place = (value, i) => [
      width - (values.length - 1 - i) * (width / (SPAN - 1)),
      height - 1.5 - (value / most) * (height - 15),
    ];
    context.strokeStyle = context.fillStyle = colour(name);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    for (const run of runs(values)) {
      const points = run.map((i) => place(values[i], i));
      context.beginPath();
      points.forEach(([x, y]) => context.lineTo(x, y));
      context.stroke();
      if (points.length === 1) context.fillRect(points[0][0] - 2, points[0][1] - 1, 3, 3);
      if (!filled) continue;
      context.lineTo(points[points.length - 1][0], height - 1);
      context.lineTo(points[0][0], height - 1);
      context.globalAlpha = 0.14;
      context.fill();
      context.globalAlpha = 1;
    }
  }
}

// Places of values, split where there are none.
function runs(values) {
  const found = [[]];
  values.forEach((value, i) => {
    if (value === null) found.push([]);
    else found[found.length - 1].push(i);
  });
  return found.filter((run) => run.length);
}
