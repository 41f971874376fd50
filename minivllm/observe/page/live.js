// The page of a server: steps as they come, what can be asked of it, and which adapters it has.

const MOST_STEPS = 600;
const RETRY = 2000; // milliseconds until a lost server is asked again
const MOST_IN_BURST = 12; // models
// A browser opens six connections to one server: one brings the steps, and one is left for what is clicked meanwhile.
const MOST_AT_ONCE = 4;
const MANY = 10; // models; with more of them there is a box to find some

// What the server calls an adapter's state, and what a user would.
const STATES = { known: "on disk", "in memory": "in memory", loading: "loading", reloading: "loading anew", leaving: "unloading", failed: "cannot be read" };

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
    this.pending = new Map(); // adapter -> what is being done to it
    this.language = "curl";
    this.box = document.getElementById("live");
    this.box.hidden = false;
    this.build();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.sleep() : this.listen()));
    setInterval(() => document.hidden || this.tell(), 1000);
    document.getElementById("charts").prepend(this.steps());
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
      this.keyBox.hidden = response.ok || ![401, 403].includes(response.status);
      this.otherKey.hidden = !this.keyBox.hidden || !this.key;
      if (response.status === 401) throw new Error(this.key ? "The server does not know this key." : "This server asks for a key. Give the one that you have for it.");
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
    this.show(true);
    document.querySelector("h1").textContent = hello.model;
    document.title = `${hello.model}, minivllm`;
    this.page.trace.runs[0].room = hello.room;
    this.names([hello.model, ...hello.adapters]);
    this.page.legend();
    this.askForAdapters();
  }

  names(models) {
    for (const name of models.slice(1)) this.page.trace.colour(name);
    if (models.join("\n") === this.models.join("\n")) return;
    this.models = models;
    const adapters = models.length - 1;
    this.about.replaceChildren(
      `A language model${adapters ? ` and ${adapters === 1 ? "one adapter" : `${adapters} adapters`}, LoRA fine-tunings of it, all` : ""} on one engine. `,
      `Each is a model of its own to OpenAI's clients. Served by minivllm ${this.hello.version}.`,
    );
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
    this.about = el("p", {});
    this.status = el("span", { className: "status soft", role: "status" }, "connecting");
    this.otherKey = el("button", { className: "plain", type: "button", hidden: true, onclick: () => (this.keyBox.hidden = false) }, "Another key");
    document.getElementById("head").replaceChildren(el("h1", {}, "minivllm"), this.about, el("div", { className: "row" }, this.status, this.otherKey));
    const given = el("input", { type: "password", placeholder: "API key", "aria-label": "API key", autocomplete: "off" });
    const use = () => {
      this.key = given.value.trim();
      given.value = "";
      this.stream?.abort();
      this.stream = null;
      clearTimeout(this.again);
      this.listen();
    };
    this.keyBox = el("form", { className: "row", hidden: true }, given, el("button", { className: "plain main" }, "Use this key"));
    this.keyBox.addEventListener("submit", (event) => (event.preventDefault(), use()));
    this.tiles = el("div", { className: "tiles" });
    const now = el("div", { className: "card" }, el("h2", {}, "Right now"), this.tiles);
    const side = el("div", {}, this.program(), now);
    this.content = el("div", {}, el("div", { className: "tools" }, this.playground(), side), this.manager());
    this.box.append(this.keyBox, this.content);
    this.show(false);
    this.tell();
  }

  // Nothing can be asked before the server has said what there is.
  show(isGreeted) {
    this.content.hidden = document.getElementById("steps").hidden = !isGreeted;
  }

  // Above the charts.
  steps() {
    const text = "A step is one pass through the model, for all running requests at once, each by its own adapter. Every column below is a step, the newest on the right. Choose one with the arrow keys or the bar below; press a name to see it alone.";
    return el("div", {}, el("h2", {}, "What the engine does, step by step"), el("p", { className: "soft" }, text), this.page.legendBox, el("p", {}));
  }

  state(text) {
    this.status.textContent = text;
    this.status.classList.toggle("on", text === "connected");
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
      [Math.round(rate).toLocaleString("en"), "tokens a second", "of prompts and answers together"],
      [isBusy ? String(last.running) : "0", "requests running", "in the batch"],
      [isBusy ? String(numWaiting(last)) : "0", "requests waiting", "for a place in the batch, or for a slot for their adapter"],
      [seconds(this.ttft?.p50), "to the first token", `the median of the last ${this.ttft?.count ?? 0} requests`],
      [seconds(this.ttft?.p99), "at worst (99 %)", `99 of 100 of the last ${this.ttft?.count ?? 0} requests had their first token by then`],
      [last && room.kv_blocks ? `${Math.round((100 * last.kv_blocks) / room.kv_blocks)} %` : "–", "of the cache in use", "KV cache: what has been computed of running requests"],
    ];
    this.tiles.replaceChildren(...tiles.map(([value, text, title]) => el("div", { className: "tile", title }, el("b", {}, value), el("span", {}, text))));
  }

  // ---- how to ask from a program ------------------------------------------------------------------------------

  program() {
    this.code = el("pre", { tabIndex: 0, "aria-label": "a request to copy" });
    const choice = (name) => el("button", { className: "plain", type: "button", value: name, onclick: () => this.showCode(name) }, name);
    this.languages = [choice("curl"), choice("Python")];
    const copy = el("button", { className: "plain push", type: "button", id: "copy", onclick: () => this.copy(copy) }, "Copy");
    return el("div", { className: "card code", id: "program" }, el("h2", {}, "From your program"), el("div", { className: "row" }, this.languages, copy), this.code);
  }

  showCode(language = this.language) {
    this.language = language;
    for (const button of this.languages) button.setAttribute("aria-pressed", String(button.value === language));
    if (!this.models.length) return;
    const chosen = this.chosenModels(); // an adapter, if any is
    const { path, body } = this.request(chosen.find((name) => name !== this.models[0]) || this.models[0]);
    this.code.textContent = language === "curl" ? this.curl(path, body) : this.python(body);
  }

  curl(path, body) {
    const key = this.key ? ` \\\n  -H "authorization: Bearer $API_KEY"` : "";
    const json = JSON.stringify(body, null, 1).replace(/\n\s*/g, " ").replaceAll("'", "'\\''");
    return `curl ${location.origin}${path} \\\n  -H 'content-type: application/json'${key} \\\n  -d '${json}'`;
  }

  python(body) {
    const { model, max_tokens } = body, call = body.messages ? "chat.completions" : "completions";
    const asked = body.messages ? `messages=[{"role": "user", "content": ${JSON.stringify(this.prompt.value)}}]` : `prompt=${JSON.stringify(body.prompt)}`;
    const key = this.key ? 'os.environ["API_KEY"]' : '"none"', said = body.messages ? "message.content" : "text";
    return `${this.key ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key})\nanswer = client.${call}.create(\n    model=${JSON.stringify(model)},\n    ${asked},\n    temperature=0,\n    max_tokens=${max_tokens},\n)\nprint(answer.choices[0].${said})`;
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.code); // over plain HTTP a browser has no clipboard, but on its own machine
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  // ---- playground ----------------------------------------------------------------------------------------

  playground() {
    this.prompt = el("textarea", { rows: 3, "aria-label": "prompt", value: "What is the capital of France?" });
    this.prompt.addEventListener("input", () => this.showCode());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.go.disabled) this.ask();
    });
    this.finder = el("input", { type: "text", placeholder: "find an adapter", "aria-label": "find an adapter", hidden: true });
    this.finder.addEventListener("input", () => this.limitChoices());
    this.chosen = el("div", { className: "legend", role: "group", "aria-label": "models" });
    this.limit = el("input", { type: "number", min: 1, max: 512, value: 48, "aria-label": "most tokens" });
    this.limit.addEventListener("input", () => this.showCode());
    this.go = el("button", { className: "plain main", type: "button", id: "ask", title: "Ctrl+Enter", onclick: () => this.ask() }, "Ask");
    this.stopper = el("button", { className: "plain", type: "button", disabled: true, onclick: () => this.asking?.abort() }, "Stop");
    const what = "Six prompts of growing length to each of the first models, all at once";
    this.burster = el("button", { className: "plain push", type: "button", id: "burst", title: what, onclick: () => this.burst() }, "Make traffic");
    this.answers = el("div", { className: "answers" });
    this.played = el("p", { className: "said", role: "status" });
    return el(
      "div",
      { className: "card", id: "playground" },
      el("h2", {}, "Ask"),
      this.prompt,
      el("div", { className: "row" }, el("span", { className: "soft" }, `Who answers, up to ${MOST_AT_ONCE} side by side:`), this.finder),
      this.chosen,
      el("div", { className: "row" }, this.go, this.stopper, el("label", {}, "at most ", this.limit, " tokens"), this.burster),
      this.played,
      this.answers,
    );
  }

  choices() {
    const kept = new Set(this.chosenModels());
    const wanted = (name, place) => (kept.size ? kept.has(name) : place < MOST_AT_ONCE);
    const chips = this.models.map((name, place) => {
      const box = el("input", { type: "checkbox", value: name, checked: wanted(name, place) });
      box.addEventListener("change", () => this.limitChoices());
      return el("label", { className: "chip" }, box, dot(this.colour(name)), place ? name : `${name} (no adapter)`);
    });
    this.chosen.replaceChildren(...chips);
    this.finder.hidden = this.models.length <= MANY;
    this.limitChoices();
  }

  chosenModels() {
    return [...this.chosen.querySelectorAll("input:checked")].map((box) => box.value);
  }

  limitChoices() {
    const boxes = [...this.chosen.querySelectorAll("input")], wanted = this.finder.value.trim().toLowerCase();
    const isFull = boxes.filter((box) => box.checked).length >= MOST_AT_ONCE;
    for (const box of boxes) {
      box.disabled = isFull && !box.checked;
      box.parentElement.hidden = !box.checked && !box.value.toLowerCase().includes(wanted);
    }
    this.showCode();
  }

  // What asks the engine takes its connections, so one at a time.
  busy(isBusy) {
    [this.go.disabled, this.burster.disabled] = [isBusy, isBusy];
  }

  colour(model) {
    return this.page.trace.colour(model === this.hello?.model ? BASE : model);
  }

  async ask() {
    const models = this.chosenModels();
    if (!models.length) return this.say(this.played, "Choose a model first.", true);
    this.asking = new AbortController();
    this.busy(true);
    this.stopper.disabled = false;
    this.say(this.played, "");
    const begun = performance.now();
    const cards = models.map((model) => {
      const text = el("pre"), told = el("div", { className: "soft", "aria-live": "polite" }, "waiting for its first token …");
      const card = el("div", { className: "answer" }, el("b", {}, model), told, text);
      card.style.borderTopColor = this.colour(model);
      return { model, text, told, card };
    });
    this.answers.replaceChildren(...cards.map(({ card }) => card));
    await Promise.all(cards.map((card) => this.answer(card, begun)));
    this.busy(false);
    this.stopper.disabled = true;
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
        told.textContent = `first token after ${since(first)} …`;
      }
      told.textContent = first ? `first token after ${since(first)}, all after ${since(performance.now() - begun)}` : "an empty answer";
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
    this.busy(true);
    const prompt = this.prompt.value || "Hello", left = this.models.slice(0, MOST_IN_BURST), all = 6 * left.length, refused = [];
    let served = 0;
    const tell = () => this.say(this.played, `Making traffic: ${served} of ${all} requests are answered.`);
    const work = async () => {
      for (let model; (model = left.shift()); tell()) {
        const prompts = [...Array(6).keys()].map((i) => `${i} ${prompt} `.repeat(i + 1));
        try {
          await (await this.post("/v1/completions", { model, prompt: prompts, max_tokens: 24, temperature: 0 })).json();
          served += 6;
        } catch (error) {
          refused.push(error.message);
        }
      }
    };
    tell();
    await Promise.all([...Array(MOST_AT_ONCE)].map(work));
    this.say(this.played, `The traffic is over: ${served} requests were answered${refused.length ? `; ${refused[0]}` : ""}.`, refused.length > 0);
    this.busy(false);
  }

  // ---- adapters ------------------------------------------------------------------------------------------

  manager() {
    const name = el("input", { type: "text", placeholder: "name", "aria-label": "name of an adapter", required: true });
    const path = el("input", { type: "text", placeholder: "its folder on the server", "aria-label": "folder of an adapter", required: true });
    const load = el("button", { className: "plain main" }, "Load");
    this.loader = el("form", { className: "row", id: "load" }, name, path, load);
    this.loader.addEventListener("submit", async (event) => {
      event.preventDefault();
      load.disabled = true;
      await this.order("Loading", "/v1/load_lora_adapter", { lora_name: name.value, lora_path: path.value });
      load.disabled = false;
    });
    this.managed = el("p", { className: "said", role: "status" });
    this.rows = el("div", { className: "scroll" });
    return el("div", { className: "card", id: "adapters" }, el("h2", {}, "Adapters"), this.rows, this.loader, this.managed);
  }

  table() {
    const may = this.hello?.may_change;
    this.loader.hidden = !may;
    const lines = this.adapters.map((adapter) => {
      const under = this.pending.get(adapter.name);
      const button = (text, doing, path, title) =>
        el("button", { className: "plain", type: "button", title, disabled: Boolean(under), onclick: () => this.order(doing, path, { lora_name: adapter.name }) }, text);
      const pin = adapter.pinned
        ? button("Unpin", "Unpinning", "/v1/unpin_lora_adapter", "others may take its slot again")
        : button("Pin", "Pinning", "/v1/pin_lora_adapter", "keep it in a slot, ready at once");
      const unload = button("Unload", "Unloading", "/v1/unload_lora_adapter", "stop serving it, when its requests have ended");
      const where = adapter.slot === null ? STATES[adapter.state] || adapter.state : `ready in slot ${adapter.slot}`;
      return el(
        "tr",
        { "aria-busy": String(Boolean(under)) },
        el("td", {}, dot(this.page.trace.colour(adapter.name)), " ", adapter.name),
        el("td", {}, under ? `${under.toLowerCase()} …` : where + (adapter.pinned ? ", pinned" : "")),
        el("td", {}, adapter.bytes === null ? "" : bytes(adapter.bytes)),
        may && el("td", {}, el("div", { className: "row tight" }, pin, unload)),
      );
    });
    const head = el("tr", {}, ["adapter", "where it is", "size", ...(may ? [""] : [])].map((text) => el("th", {}, text)));
    this.rows.replaceChildren(lines.length ? el("table", {}, head, lines) : el("p", { className: "soft" }, "No adapter is served yet."));
    if (!may) this.say(this.managed, "To load and unload adapters here, the server is started with --allow-runtime-lora and --lora-root FOLDER.");
  }

  // doing   what is said until the server has answered: an unload waits for the requests that use the adapter
  async order(doing, path, body) {
    this.pending.set(body.lora_name, doing);
    this.table();
    this.say(this.managed, `${doing} ${body.lora_name} …${doing === "Unloading" ? " It is done when the requests that use it have ended." : ""}`);
    try {
      const response = await this.post(path, body);
      this.say(this.managed, await response.text());
    } catch (error) {
      this.say(this.managed, error.message, true);
    }
    this.pending.delete(body.lora_name);
    this.table();
    this.askForAdapters();
  }
}

const since = (milliseconds) => (milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`);

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
