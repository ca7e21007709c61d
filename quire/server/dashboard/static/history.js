// What happened between two looks at the engine, from counters and histograms that only grow.

const WINDOW = 60; // looks over which percentiles are taken

export class HistogramHistory {
  constructor() {
    this.looks = [];
  }

  add(histogram) {
    const last = this.looks[this.looks.length - 1];
    if (last && histogram.count < last.count) this.looks = []; // a new engine counts from 0
    this.looks.push(histogram);
    if (this.looks.length > WINDOW + 1) this.looks.shift();
  }

  // The mean since the last look, or null where nothing was observed.
  get latest() {
    const [before, now] = this.looks.slice(-2);
    if (!now || now.count === before.count) return null;
    return (now.sum - before.sum) / (now.count - before.count);
  }

  // Interpolated within its bucket; over the whole life of the engine where it was idle of late.
  quantile(share) {
    const now = this.looks[this.looks.length - 1];
    let before = this.looks[0].counts;
    if (now.count === this.looks[0].count) before = before.map(() => 0);
    const counts = now.counts.map((value, i) => value - before[i]);
    const total = counts[counts.length - 1];
    if (!total) return null;
    const rank = share * total;
    const place = counts.findIndex((value) => value >= rank);
    const low = place ? now.bounds[place - 1] : 0;
    const high = now.bounds[place] ?? low;
    const below = place ? counts[place - 1] : 0;
    return low + ((high - low) * (rank - below)) / (counts[place] - below);
  }
}
