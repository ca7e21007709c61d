// The live view: draws what `/dashboard/state` says.

import { BlockMap, unpack } from "./blocks.js";
import { Chart } from "./charts.js";
import { byId, bytes, count, element, legendEntry, percent, rate, seconds, setText } from "./dom.js";
import { HistogramHistory } from "./history.js";

const MEMORY = [
  { kind: "weights", name: "weights", colour: "weights" },
  { kind: "kv_used", name: "KV used", colour: "owned" },
  { kind: "kv_cached", name: "KV cached", colour: "cached" },
  { kind: "kv_free", name: "KV free", colour: "free" },
  { kind: "other", name: "other", colour: "other" },
];
const MOST_ENTRIES = 512;

export class EngineView {
  // `onChoose` is called when another request is pointed at, so that its blocks can be fetched.
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.hovered = null;
    this.pinned = null;
    this.ownRequest = null;
    this.ttft = new HistogramHistory();
    this.itl = new HistogramHistory();
    this.charts = {
      requests: new Chart(byId("chart-requests"), ["owned", "shared"], count),
      tokens: new Chart(byId("chart-tokens"), ["owned", "cached"], rate),
      ttft: new Chart(byId("chart-ttft"), ["weights"], seconds),
      itl: new Chart(byId("chart-itl"), ["weights"], seconds),
    };
    this.pointedAt = null;
    this.map = new BlockMap(byId("blocks"), (text) => {
      this.pointedAt = text;
      this._note();
    });
    byId("order").addEventListener("click", (event) => {
      this.map.isByOwner = !this.map.isByOwner;
      event.currentTarget.textContent = this.map.isByOwner ? "By owner" : "By number";
      if (this.state) this._blocks(this.state);
    });
  }

  // The sequence whose block table is wanted: under the pointer, clicked, or the chat's own.
  get chosen() {
    return this.hovered ?? this.pinned ?? this.ownKey;
  }

  get ownKey() {
    const own = this.state?.running.find((one) => this._isOwn(one));
    return own ? own.key : null;
  }

  // `isTick`: a point in the charts; otherwise only the blocks of a request were wanted.
  show(state, isTick) {
    this.state = state;
    if (isTick) this._figures(state);
    this._requests(state);
    this._blocks(state);
    this._memory(state.memory);
    this._advice(state.advice);
  }

  redraw() {
    Object.values(this.charts).forEach((chart) => chart.draw());
    this.map.draw();
  }

  _figures(state) {
    this.ttft.add(state.time_to_first_token_seconds);
    this.itl.add(state.inter_token_latency_seconds);
    setText("running", count(state.num_running));
    setText("waiting", count(state.num_waiting));
    setText("generation-rate", rate(state.generation_tokens_per_s));
    setText("prompt-rate", rate(state.prompt_tokens_per_s));
    for (const [name, history] of [["ttft", this.ttft], ["itl", this.itl]]) {
      setText(`${name}-p50`, seconds(history.quantile(0.5)));
      setText(`${name}-p95`, seconds(history.quantile(0.95)));
      this.charts[name].add(history.latest);
    }
    this.charts.requests.add(state.num_running, state.num_waiting);
    this.charts.tokens.add(state.generation_tokens_per_s, state.prompt_tokens_per_s);
    const asked = state.prefix_cache_queries;
    setText("hit-rate", asked ? percent(state.prefix_cache_hits / asked) : "–");
    const drafted = state.spec_decode_num_draft_tokens;
    byId("drafts").hidden = !drafted;
    setText("draft-rate", drafted ? percent(state.spec_decode_num_accepted_tokens / drafted) : "–");
    setText("preemptions", count(state.num_preemptions));
  }

  _blocks(state) {
    const table = state.table?.key === this.chosen ? state.table.blocks : [];
    const sequences = state.running.map((one) => ({ ...one, name: this._name(one) }));
    const chosen = { key: this.chosen, blocks: table };
    this.map.show(unpack(state.blocks, state.num_blocks), sequences, chosen);
    this._note();
    setText("kv-size", `${count(state.num_blocks)} blocks of ${state.block_size} tokens`);
    byId("table-view").hidden = !table.length;
    if (!table.length) return;
    const one = state.running.find((sequence) => sequence.key === state.table.key);
    setText("table-title", `Block table${one ? ` of ${this._name(one)}` : ""}: logical → physical`);
    const entries = table.slice(0, MOST_ENTRIES).map((physical, logical) => {
      const entry = element("div", "entry");
      entry.append(element("span", "", `${logical} → `), String(physical));
      entry.style.borderLeftColor = `var(--${this.map.stateOf(physical)})`;
      entry.title = `block ${physical} is ${this.map.stateOf(physical)}`;
      return entry;
    });
    if (table.length > MOST_ENTRIES) {
      entries.push(element("div", "entry", `and ${count(table.length - MOST_ENTRIES)} more`));
    }
    byId("table").replaceChildren(...entries);
  }

  _note() {
    setText("block-note", this.pointedAt ?? this.map.note);
  }

  _requests(state) {
    const listed = [...state.running, ...state.waiting];
    if (!listed.some((one) => one.key === this.pinned)) this.pinned = null;
    if (!listed.some((one) => one.key === this.hovered)) this.hovered = null;
    const all = state.num_running + state.num_waiting;
    setText("listed", all > listed.length ? `${listed.length} of ${count(all)}` : "");
    byId("none").hidden = listed.length > 0;
    const old = new Map([...byId("rows").children].map((row) => [row.dataset.key, row]));
    byId("rows").replaceChildren(...listed.map((one) => this._row(one, old.get(one.key))));
  }

  // Rows are kept as long as their requests live, so that the pointer stays where it is.
  _row(one, old) {
    const row = old ?? this._newRow(one.key);
    row.classList.toggle("marked", one.key === this.chosen);
    const progress = one.state === "running" && one.tokens === one.prompt_tokens;
    const state = progress ? `prefill ${percent(one.computed_tokens / one.prompt_tokens)}` : one.state;
    const [tag, name] = row.cells[0].children;
    tag.hidden = !this._isOwn(one);
    name.textContent = row.cells[0].title = this._name(one);
    const texts = [
      state,
      count(one.prompt_tokens),
      count(one.tokens - one.prompt_tokens),
      count(one.num_blocks),
      seconds(one.age_s),
    ];
    texts.forEach((text, i) => {
      row.cells[i + 1].textContent = text;
    });
    return row;
  }

  _newRow(key) {
    const row = element("tr");
    row.dataset.key = key;
    row.tabIndex = 0;
    for (let i = 0; i < 6; i += 1) row.append(element("td", i > 1 ? "number" : ""));
    row.cells[0].append(element("span", "tag", "this chat"), element("span"));
    const point = (value) => {
      this.hovered = value;
      this.onChoose();
    };
    row.addEventListener("mouseenter", () => point(key));
    row.addEventListener("focus", () => point(key));
    row.addEventListener("mouseleave", () => point(null));
    row.addEventListener("blur", () => point(null));
    row.addEventListener("click", () => {
      this.pinned = this.pinned === key ? null : key;
      this.onChoose();
    });
    return row;
  }

  _name(one) {
    return one.request_id ?? "another key's request";
  }

  _isOwn(one) {
    return this.ownRequest !== null && one.request_id === this.ownRequest;
  }

  _memory(memory) {
    const parts = MEMORY.map((part) => ({ ...part, size: memory[part.kind] }));
    const named = parts.reduce((sum, part) => sum + part.size, 0);
    // A GPU is Quire's own; of a computer's memory it holds a part, which would be too thin to see.
    const all = named > memory.total / 2 ? Math.max(memory.total, named) : named;
    setText("memory-total", memory.total ? `${bytes(named)} of ${bytes(memory.total)}` : "");
    byId("memory-bar").replaceChildren(
      ...parts.map((part) => {
        const piece = element("div");
        piece.style.width = `${(part.size / (all || 1)) * 100}%`;
        piece.style.background = `var(--${part.colour})`;
        piece.title = `${part.name}: ${bytes(part.size)}`;
        return piece;
      }),
    );
    byId("memory-legend").replaceChildren(
      ...parts.map((part) => legendEntry(part.colour, part.name, bytes(part.size))),
    );
  }

  _advice(advice) {
    byId("advice").hidden = !advice.length;
    byId("advice-list").replaceChildren(...advice.map((text) => element("li", "", text)));
  }
}
