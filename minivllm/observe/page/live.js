// The page of a server: steps as they come, what can be asked of it, and which adapters it has.

const MOST_STEPS = 600;
const RETRY = 2000; // milliseconds until a lost server is asked again
const MOST_IN_BURST = 12; // models
const MOST_ANSWERS = 5; // a browser opens six connections to one server, and one of them brings the steps

Trace.prototype.extend = function (steps) {
  const all = this.runs[0].steps;
  const last = all.length ? all[all.length - 1].step : -1;
  const fresh = steps.filter((step) => step.step > last);
  if (steps.length && !fresh.length && steps[steps.length - 1].step < last) {
    all.splice(0, all.length, ...steps); // the server was started anew
    return -Infinity;
  }
  all.push(...fresh);
  return all.splice(0, Math.max(0, all.length - MOST_STEPS)).length;
};

class Live {
  constructor(page) {
    this.page = page;
    this.key = "";
    this.models = [];
    this.adapters = [];
    this.box = document.getElementById("live");
    this.box.hidden = false;
    this.build();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.sleep() : this.listen()));
    setInterval(() => document.hidden || this.tell(), 1000);
    this.listen();
  }

  // ---- the server ----------------------------------------------------------------------------------------

  headers() {
    return { "content-type": "application/json", ...(this.key && { authorization: `Bearer ${this.key}` }) };
  }

  async post(path, body, signal) {
    const response = await fetch(path, { method: "POST", headers: this.headers(), body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await saidBy(response));
    return response;
  }

  // One connection while somebody looks; none while the page is hidden.
  async listen() {
    if (this.stream || document.hidden) return;
    const stream = (this.stream = new AbortController());
    try {
      const response = await fetch("/events", { headers: this.headers(), signal: stream.signal });
      this.keyBox.hidden = response.status !== 401 && !this.key;
      if (!response.ok) throw new Error(await saidBy(response));
      this.state("connected");
      for await (const event of events(response)) this.hear(event);
      this.state("the server has ended the connection");
    } catch (error) {
      if (!stream.signal.aborted) this.state(error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
    if (this.stream !== stream) return;
    this.stream = null;
    if (!this.keyBox.hidden && !this.connected) return; // until somebody gives a key
    this.connected = false;
    this.again = setTimeout(() => this.listen(), RETRY);
  }

  sleep() {
    clearTimeout(this.again);
    this.stream?.abort();
    this.stream = null;
    this.state("asleep");
  }

  hear({ steps, ttft, hello }) {
    const { page } = this;
    if (hello) this.greet(hello);
    this.ttft = ttft;
    const gone = page.trace.extend(steps);
    if (steps.length) this.heardAt = performance.now();
    for (const name of steps.flatMap(adaptersOf)) page.trace.colour(name);
    if (page.known !== page.trace.colours.size) page.legend();
    if (steps.length) page.drawn += 1;
    page.go(page.follow ? page.trace.length - 1 : page.column - gone, false);
    if (steps.some(isEventful)) this.askForAdapters();
    this.tell();
  }

  greet(hello) {
    this.connected = true;
    this.hello = hello;
    document.querySelector("h1").textContent = document.title = `${hello.model}, live`;
    this.page.trace.runs[0].room = hello.room;
    this.names([hello.model, ...hello.adapters]);
    this.page.legend();
    this.askForAdapters();
  }

  names(models) {
    for (const name of models.slice(1)) this.page.trace.colour(name);
    if (models.join("\n") === this.models.join("\n")) return;
    this.models = models;
    this.choices();
  }

  // At most once in half a second, however often it is asked for.
  askForAdapters() {
    if (this.asked) return;
    this.asked = setTimeout(async () => {
      this.asked = 0;
      try {
        const response = await fetch("/v1/adapters", { headers: this.headers() });
        if (!response.ok) throw new Error(await saidBy(response));
        this.adapters = (await response.json()).data;
        this.names([this.hello.model, ...this.adapters.map((adapter) => adapter.name)]);
        this.table();
      } catch (error) {
        this.say(this.managed, error.message, true);
      }
    }, 500);
  }

  // ---- what is shown -------------------------------------------------------------------------------------

  build() {
    this.status = el("p", { className: "soft", role: "status" }, "connecting");
    this.tiles = el("div", { className: "tiles" });
    const given = el("input", { type: "password", placeholder: "API key", "aria-label": "API key", autocomplete: "off" });
    const use = () => {
      this.key = given.value.trim();
      given.value = "";
      clearTimeout(this.again);
      this.listen();
    };
    this.keyBox = el("form", { className: "row", hidden: true }, given, el("button", { className: "plain main" }, "Use this key"));
    this.keyBox.addEventListener("submit", (event) => (event.preventDefault(), use()));
    this.box.append(this.status, this.keyBox, this.tiles, el("div", { className: "tools" }, this.playground(), this.manager()));
    this.tell();
  }

  state(text) {
    this.status.textContent = text;
  }

  say(box, text, isBad = false) {
    box.textContent = text;
    box.classList.toggle("bad", isBad);
  }

  tell() {
    const { trace } = this.page;
    const last = trace.at(trace.length - 1);
    const isBusy = last && performance.now() - (this.heardAt || 0) < 1500;
    const rate = isBusy ? [...trace.rates(trace.length - 1).values()].reduce((sum, each) => sum + each, 0) : 0;
    const { room } = trace.runs[0];
    const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
    const tiles = [
      [Math.round(rate).toLocaleString("en"), "tokens a second"],
      [isBusy ? String(last.running) : "0", "requests run"],
      [isBusy ? String(numWaiting(last)) : "0", "requests wait"],
      [seconds(this.ttft?.p50), "to the first token, p50"],
      [seconds(this.ttft?.p99), `p99 of ${this.ttft?.count ?? 0}`],
      [last && room.kv_blocks ? `${Math.round((100 * last.kv_blocks) / room.kv_blocks)} %` : "–", "of the KV cache"],
    ];
    this.tiles.replaceChildren(...tiles.map(([value, text]) => el("div", { className: "tile" }, el("b", {}, value), el("span", {}, text))));
  }

  // ---- playground ----------------------------------------------------------------------------------------

  playground() {
    this.prompt = el("textarea", { rows: 3, "aria-label": "prompt", value: "What is the capital of France?" });
    this.chosen = el("div", { className: "legend" });
    this.limit = el("input", { type: "number", min: 1, max: 512, value: 48, "aria-label": "most tokens" });
    this.go = el("button", { className: "plain main", type: "button", id: "ask", onclick: () => this.ask() }, "Ask all");
    this.stopper = el("button", { className: "plain", type: "button", disabled: true, onclick: () => this.asking?.abort() }, "Stop");
    const burst = el("button", { className: "plain", type: "button", id: "burst", onclick: () => this.burst() }, "Burst of traffic");
    this.answers = el("div", { className: "answers" });
    this.played = el("p", { className: "said", role: "status" });
    return el(
      "div",
      { className: "card", id: "playground" },
      el("h2", {}, "Playground"),
      el("p", { className: "soft" }, "One prompt to the base model and up to four adapters, in one mixed batch."),
      this.prompt,
      this.chosen,
      el("div", { className: "row" }, this.go, this.stopper, burst, el("label", {}, "most tokens ", this.limit)),
      this.played,
      this.answers,
    );
  }

  choices() {
    const kept = new Set([...this.chosen.querySelectorAll("input:checked")].map((box) => box.value));
    const wanted = (name, place) => (kept.size ? kept.has(name) : place < MOST_ANSWERS);
    const chips = this.models.map((name, place) => {
      const box = el("input", { type: "checkbox", value: name, checked: wanted(name, place) });
      box.addEventListener("change", () => this.limitChoices());
      return el("label", { className: "chip" }, box, dot(this.colour(name)), place ? name : `${name} (base)`);
    });
    this.chosen.replaceChildren(...chips);
    this.limitChoices();
  }

  limitChoices() {
    const boxes = [...this.chosen.querySelectorAll("input")];
    const isFull = boxes.filter((box) => box.checked).length >= MOST_ANSWERS;
    for (const box of boxes) box.disabled = isFull && !box.checked;
  }

  colour(model) {
    return this.page.trace.colour(model === this.hello?.model ? BASE : model);
  }

  async ask() {
    const models = [...this.chosen.querySelectorAll("input:checked")].map((box) => box.value);
    if (!models.length) return this.say(this.played, "Choose a model first.", true);
    this.asking = new AbortController();
    [this.go.disabled, this.stopper.disabled] = [true, false];
    this.say(this.played, "");
    const begun = performance.now();
    const cards = models.map((model) => {
      const text = el("pre"), told = el("div", { className: "soft" }, "waits");
      const card = el("div", { className: "answer" }, el("b", {}, model), told, text);
      card.style.borderTopColor = this.colour(model);
      return { model, text, told, card };
    });
    this.answers.replaceChildren(...cards.map(({ card }) => card));
    await Promise.all(cards.map((card) => this.answer(card, begun)));
    [this.go.disabled, this.stopper.disabled] = [false, true];
  }

  async answer({ model, text, told }, begun) {
    const { path, body, textOf } = this.request(model);
    let tokens = 0, first = 0;
    try {
      const response = await this.post(path, { ...body, stream: true }, this.asking.signal);
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        const delta = event.choices?.length ? textOf(event.choices[0]) : "";
        if (!delta) continue;
        first ||= performance.now() - begun;
        tokens += 1;
        text.textContent += delta;
        told.textContent = `first after ${Math.round(first)} ms`;
      }
      told.textContent = first ? `first after ${Math.round(first)} ms, ${((performance.now() - begun) / 1000).toFixed(1)} s in all` : "said nothing";
    } catch (error) {
      told.textContent = this.asking.signal.aborted ? "stopped" : error.message;
    }
  }

  request(model) {
    const common = { model, max_tokens: Number(this.limit.value) || 48, temperature: 0 };
    const prompt = this.prompt.value;
    if (this.hello?.has_chat)
      return { path: "/v1/chat/completions", body: { ...common, messages: [{ role: "user", content: prompt }] }, textOf: (choice) => choice.delta?.content || "" };
    return { path: "/v1/completions", body: { ...common, prompt }, textOf: (choice) => choice.text };
  }

  // Six prompts to each of the first models, longer ones later.
  async burst() {
    this.say(this.played, "A burst is under way.");
    const prompt = this.prompt.value || "Hello";
    const bodies = this.models.slice(0, MOST_IN_BURST).map((model) => ({ model, prompt: [...Array(6).keys()].map((i) => `${i} ${prompt} `.repeat(i + 1)), max_tokens: 24, temperature: 0 }));
    const done = await Promise.allSettled(bodies.map((body) => this.post("/v1/completions", body).then((response) => response.json())));
    const refused = done.filter((each) => each.status === "rejected").map((each) => each.reason.message);
    const served = 6 * (done.length - refused.length);
    this.say(this.played, `The burst is over: ${served} requests served${refused.length ? `; ${refused[0]}` : ""}.`, refused.length > 0);
  }

  // ---- adapters ------------------------------------------------------------------------------------------

  manager() {
    const name = el("input", { type: "text", placeholder: "name", "aria-label": "name of an adapter" });
    const path = el("input", { type: "text", placeholder: "folder below --lora-root", "aria-label": "folder of an adapter" });
    this.loader = el("form", { className: "row", id: "load" }, name, path, el("button", { className: "plain main" }, "Load"));
    this.loader.addEventListener("submit", (event) => {
      event.preventDefault();
      this.order("/v1/load_lora_adapter", { lora_name: name.value, lora_path: path.value });
    });
    this.managed = el("p", { className: "said", role: "status" });
    this.rows = el("div", { className: "scroll" });
    return el("div", { className: "card", id: "adapters" }, el("h2", {}, "Adapters"), this.rows, this.loader, this.managed);
  }

  table() {
    const may = this.hello?.may_change;
    this.loader.hidden = !may;
    const lines = this.adapters.map((adapter) => {
      const button = (text, path) => el("button", { className: "plain", type: "button", disabled: !may, onclick: () => this.order(path, { lora_name: adapter.name }) }, text);
      const pin = adapter.pinned ? button("Unpin", "/v1/unpin_lora_adapter") : button("Pin", "/v1/pin_lora_adapter");
      const where = adapter.slot === null ? adapter.state : `slot ${adapter.slot}`;
      return el(
        "tr",
        {},
        el("td", {}, dot(this.page.trace.colour(adapter.name)), " ", adapter.name),
        el("td", {}, where + (adapter.pinned ? ", pinned" : "")),
        el("td", {}, adapter.bytes === null ? "" : bytes(adapter.bytes)),
        el("td", {}, el("div", { className: "row tight" }, pin, button("Unload", "/v1/unload_lora_adapter"))),
      );
    });
    const head = el("tr", {}, ["adapter", "where", "size", ""].map((text) => el("th", {}, text)));
    this.rows.replaceChildren(lines.length ? el("table", {}, head, lines) : el("p", { className: "soft" }, "No adapter is served."));
    if (!may && lines.length) this.say(this.managed, "Start the server with --allow-runtime-lora and --lora-root to change them.");
  }

  async order(path, body) {
    this.say(this.managed, "Asked. The server answers when it is done: an unload, when the requests that use the adapter have ended.");
    try {
      const response = await this.post(path, body);
      this.say(this.managed, await response.text());
    } catch (error) {
      this.say(this.managed, error.message, true);
    }
    this.askForAdapters();
  }
}

// Server-sent events of a response, as they come; the last one of OpenAI's is no JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function saidBy(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}

const live = new Live(page);
