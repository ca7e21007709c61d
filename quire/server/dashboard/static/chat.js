// The conversation, and the reply that is being written.

import { events, request } from "./api.js";
import { byId, count, element, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";

export class Chat {
  // `onRequest` hears the id of the reply while it is written, and null at its end.
  constructor(onRequest, onFailure) {
    this.onRequest = onRequest;
    this.onFailure = onFailure;
    this.turns = [];
    this.stopper = null;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stopper?.abort());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("settings-button").addEventListener("click", (event) => {
      const settings = byId("settings");
      settings.hidden = !settings.hidden;
      event.currentTarget.setAttribute("aria-expanded", String(!settings.hidden));
    });
  }

  clear() {
    this.stopper?.abort();
    this.turns = [];
    byId("messages").replaceChildren(byId("empty"));
    byId("empty").hidden = false;
  }

  async send() {
    const text = byId("prompt").value.trim();
    if (!text || this.stopper) return;
    byId("prompt").value = "";
    byId("empty").hidden = true;
    this._bubble("user").text.textContent = text;
    this.turns.push({ role: "user", content: text });
    const turns = this.turns; // a new chat has others
    const bubble = this._bubble("assistant open");
    this._writing(new AbortController());
    const reply = new Reply(bubble, () => this._follow());
    try {
      await reply.read(this._body(), this.stopper.signal, this.onRequest);
    } catch (error) {
      reply.failed(error);
      if (error.name !== "AbortError") this.onFailure(error);
    }
    reply.view.draw();
    turns.push({ role: "assistant", content: reply.text });
    bubble.root.classList.remove("open");
    this._writing(null);
    this.onRequest(null);
  }

  _body() {
    const system = byId("system").value.trim();
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns],
      stream: true,
      stream_options: { include_usage: true, include_progress: true },
    };
    const temperature = byId("temperature").value;
    const most = byId("max-tokens").value;
    if (temperature !== "") body.temperature = Number(temperature);
    if (most !== "") body.max_tokens = Number(most);
    return body;
  }

  _writing(stopper) {
    this.stopper = stopper;
    byId("send").hidden = stopper !== null;
    byId("stop").hidden = stopper === null;
    if (stopper === null) byId("prompt").focus();
  }

  _bubble(kind) {
    const root = element("div", `message ${kind}`);
    const text = element("div", "text");
    const facts = element("div", "facts");
    root.append(text, facts);
    byId("messages").append(root);
    this._follow();
    return { root, text, facts };
  }

  _follow() {
    const box = byId("messages");
    requestAnimationFrame(() => {
      box.scrollTop = box.scrollHeight; // after the reply was drawn
    });
  }
}

class Reply {
  constructor(bubble, onGrowth) {
    this.bubble = bubble;
    this.onGrowth = onGrowth;
    this.text = "";
    this.view = new MarkdownView(bubble.text);
    this.started = performance.now();
    this.first = null;
  }

  async read(body, signal, onRequest) {
    const options = { method: "POST", body: JSON.stringify(body), signal };
    const reply = await request("v1/chat/completions", options);
    for await (const event of events(reply)) {
      onRequest(event.id);
      if (event.progress) this._progress(event.progress);
      if (event.usage) this._done(event.usage);
      for (const choice of event.choices) this._grow(choice);
    }
  }

  failed(error) {
    if (error.name === "AbortError") {
      this.bubble.facts.textContent = "stopped";
      return;
    }
    this.bubble.root.classList.add("failed");
    this.bubble.facts.textContent = error.message;
  }

  _progress({ prompt_tokens: all, processed_tokens: done, eta_s: left }) {
    const wait = left === null ? "" : `, about ${seconds(left)} left`;
    this.bubble.facts.textContent = `reading the prompt: ${count(done)} of ${count(all)} tokens${wait}`;
  }

  _grow(choice) {
    const text = choice.delta.content;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (!text) return;
    this.first ??= performance.now();
    this.text += text;
    this.view.append(text);
    this.bubble.facts.textContent = "";
    this.onGrowth();
  }

  _done(usage) {
    const now = performance.now();
    const out = usage.completion_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const facts = [`${count(usage.prompt_tokens)} tokens in (${count(cached)} cached)`, `${count(out)} out`];
    if (this.first !== null) {
      facts.push(`first after ${seconds((this.first - this.started) / 1000)}`);
      if (out > 1) facts.push(`${((out - 1) / ((now - this.first) / 1000)).toFixed(1)} tokens/s`);
    }
    if (this.reason === "length") facts.push("cut at max tokens");
    this.bubble.facts.textContent = facts.join(" · ");
    this.onGrowth();
  }
}
