// The page around the charts: legend, scrubber, and what is in the step that is looked at.

const SHOWN = [["all steps", Infinity], ["400 steps", 400], ["100 steps", 100], ["30 steps", 30]];

const MOST_REASONS = 4; // that are shown before they are asked for

class Page {
  constructor(data) {
    this.data = data;
    this.trace = new Trace(data);
    this.trace.differs = new Set(data.differs || []);
    this.two = data.runs.length > 1;
    this.shown = Infinity;
    this.follow = Boolean(data.live);
    this.column = this.follow ? 0 : data.difference?.column ?? 0;
    this.focus = undefined; // of an adapter; null is the base model
    this.ink = {};
    this.drawn = 0; // how often there was something new to draw
    document.querySelector("main").classList.toggle("two", this.two);
    this.head();
    this.charts = this.figures();
    this.bar();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.inks());
    this.inks();
    new ResizeObserver(() => this.changed()).observe(document.getElementById("charts"));
    addEventListener("keydown", (event) => this.key(event));
    this.details();
  }

  inks() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "line", "lane", "card", "accent", "waiting", "skipped"])
      this.ink[name] = style.getPropertyValue(`--${name}`).trim();
    this.changed();
  }

  // Draw again, once a frame at most. fresh: whether more has changed than the place
  changed(fresh = true) {
    this.drawn += fresh;
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      const view = this.view();
      for (const chart of this.charts) chart.render(view);
      this.tellPlace();
    });
  }

  view() {
    const length = this.trace.length, shown = Math.min(this.shown, Math.max(length, 1));
    const from = Math.max(0, Math.min(length - shown, Math.round(this.column - shown / 2)));
    return { from, to: from + shown };
  }

  go(column, byHand = true) {
    const last = Math.max(0, this.trace.length - 1);
    this.column = Math.max(0, Math.min(last, column));
    if (byHand) this.follow = Boolean(this.data.live) && this.column === last;
    this.details();
    this.changed(false);
  }

  // ---- above ---------------------------------------------------------------------------------------------

  head() {
    const head = document.getElementById("head");
    head.replaceChildren(el("h1", {}, this.data.title));
    for (const note of this.data.notes || []) head.append(el("p", { className: "soft" }, note));
    if (this.data.verdict) head.append(this.verdict());
    if (!this.data.live) this.trace.runs.forEach((run, number) => head.append(this.facts(run, number)));
    this.legendBox = el("div", { className: "legend" });
    head.append(this.legendBox);
    this.legend();
  }

  facts(run, number) {
    const counts = Object.entries(this.trace.counts(number));
    const told = counts.map(([name, count]) => el("span", {}, el("b", {}, count.toLocaleString("en")), ` ${count === 1 ? name.replace(/s$/, "") : name}`));
    return el("p", { className: "facts" }, this.two && el("span", {}, `${run.name}:`), told);
  }

  verdict() {
    const { difference, verdict } = this.data;
    const items = (reasons) => el("ul", {}, reasons.map((reason) => el("li", {}, reason)));
    const reasons = difference?.reasons || [], further = reasons.slice(MOST_REASONS);
    const jump = el("button", { className: "plain", type: "button", onclick: () => this.go(difference?.column) }, "Show that step");
    return el(
      "div",
      { className: `card verdict${difference ? " differs" : ""}`, id: "verdict" },
      el("h2", {}, verdict),
      reasons.length > 0 && items(reasons.slice(0, MOST_REASONS)),
      further.length > 0 && el("details", {}, el("summary", {}, `and ${further.length} more`), items(further)),
      difference && jump,
    );
  }

  legend() {
    const chip = (adapter) => {
      const press = () => {
        this.focus = this.focus === adapter ? undefined : adapter;
        this.legend();
        this.changed();
      };
      const pressed = String(this.focus === adapter);
      return el("button", { className: "chip", type: "button", onclick: press, "aria-pressed": pressed, title: "show this one alone" }, dot(this.trace.colour(adapter)), nameOf(adapter));
    };
    this.legendBox.replaceChildren(...[BASE, ...this.trace.colours.keys()].map(chip));
    this.known = this.trace.colours.size;
  }

  // ---- charts --------------------------------------------------------------------------------------------

  figures() {
    const charts = [];
    const figure = (title, note, kinds, keys, runs = this.trace.runs.map((_, number) => number)) => {
      const lanes = runs.map((run) => {
        const chart = new Chart(this, run, ...kinds);
        charts.push(chart);
        return el("div", { className: "lane" }, this.two && runs.length > 1 && el("small", {}, this.trace.runs[run].name), chart.canvas);
      });
      const caption = el("figcaption", {}, el("b", {}, title), " ", el("span", {}, note));
      document.getElementById("charts").append(el("figure", { "aria-label": `${title}: ${note}` }, caption, lanes, keys && el("div", { className: "keys" }, keys)));
    };
    const key = (colour, text) => {
      const box = el("i");
      box.style.background = colour;
      return el("span", {}, box, text);
    };
    if (this.two) figure("Differences.", "Columns in which the two are not alike.", [() => 14, drawDifferences], null, [0]);
    const marks = ["▼ read from disk", "✕ somebody was evicted", "pale: not used by this step", "outlined: pinned"].map((text) => el("span", {}, text));
    figure("Slots.", "Which adapter each one holds.", [slotHeight, drawSlots], marks);
    figure("Rows.", "Every column is one forward pass over all its colours.", [rowsHeight, drawRows], [el("span", {}, "hollow: a prompt or a part of one")]);
    const queue = [key("var(--waiting)", "waiting"), key("var(--skipped)", "of these passed over"), key("var(--accent)", "running")];
    figure("Queue.", "How many requests wait, and how many run.", [() => QUEUE, drawQueue], queue);
    if (this.two) return charts;
    figure("Tokens a second.", "Computed for each adapter, prompts included, over eight steps.", [() => RATES, drawRates]);
    const tiers = TIERS.map(([name, colour]) => key(colour, name));
    figure("Memory by tier.", "How full each one is.", [() => MEMORY, drawMemory], tiers);
    return charts;
  }

  // ---- below ---------------------------------------------------------------------------------------------

  bar() {
    const button = (text, title, onclick) => el("button", { className: "plain", type: "button", title, "aria-label": title, onclick }, text);
    this.range = el("input", { type: "range", min: 0, step: 1, "aria-label": "step" });
    this.range.addEventListener("input", () => this.go(Number(this.range.value)));
    this.place = el("output");
    this.playing = button("Play", "play or stop", () => this.play());
    const zoom = el("select", { "aria-label": "how many steps are shown" }, SHOWN.map(([name], i) => el("option", { value: i }, name)));
    zoom.addEventListener("change", () => {
      this.shown = SHOWN[zoom.value][1];
      this.changed();
    });
    const last = button("Live", "follow the newest step", () => this.go(this.trace.length - 1));
    document.getElementById("scrubber").append(
      el(
        "div",
        {},
        this.range,
        button("◀", "a step back", () => this.go(this.column - 1)),
        this.playing,
        button("▶", "a step on", () => this.go(this.column + 1)),
        this.data.live ? last : button("Next event", "the next load, eviction or preemption", () => this.nextEvent()),
        this.place,
        el("span", { className: "push" }, zoom),
      ),
    );
  }

  tellPlace() {
    this.range.max = Math.max(0, this.trace.length - 1);
    this.range.value = this.column;
    const step = this.trace.at(this.column) || (this.two && this.trace.at(this.column, 1));
    const text = step ? `step ${step.step} · ${clock(step.time_s)}` : "no step yet";
    this.place.textContent = text;
    this.range.setAttribute("aria-valuetext", text);
  }

  nextEvent() {
    const runs = this.trace.runs.map((_, number) => number);
    for (let c = this.column + 1; c < this.trace.length; c++)
      if (runs.some((run) => isEventful(this.trace.at(c, run)))) return this.go(c);
  }

  play() {
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = 0;
    } else {
      if (this.column >= this.trace.length - 1) this.go(0);
      this.timer = setInterval(() => (this.column < this.trace.length - 1 ? this.go(this.column + 1) : this.play()), 150);
    }
    this.playing.textContent = this.timer ? "Stop" : "Play";
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.target.matches("input, textarea, select") || !(event.key in moves)) return;
    event.preventDefault();
    this.go(this.column + moves[event.key] * (event.shiftKey ? 10 : 1));
  }

  // ---- one step ------------------------------------------------------------------------------------------

  details() {
    const box = document.getElementById("details");
    const steps = this.trace.runs.map((_, run) => this.trace.at(this.column, run));
    const sides = steps.map((step, run) => this.side(step, run, this.two ? steps[1 - run] : step));
    box.replaceChildren(el("div", { className: "card" }, el("div", { className: "sides" }, sides)));
  }

  // What one run did in the column; what the other one did not do likewise is marked.
  side(step, run, other) {
    const name = this.two ? `${this.trace.runs[run].name}, ` : "";
    if (!step) return el("div", {}, el("h2", {}, `${name}no step`), el("p", { className: "soft" }, this.trace.length ? "It took no step here." : "Nothing has been computed yet."));
    const tokens = step.rows.reduce((sum, row) => sum + row.tokens, 0);
    const title = `${name}step ${step.step}`.replace(/^./, (first) => first.toUpperCase());
    const parts = [
      el("h2", {}, title),
      el("p", { className: "soft" }, `${counted(step.rows.length, "row")}, ${counted(tokens, "token")}, ${this.data.live ? clock(step.time_s) : `after ${step.time_s.toFixed(3)} s`}`),
      step.error && el("p", { className: "said bad" }, step.error),
    ];
    const lists = [["Happened", eventsOf], ["Slots", slotLines], ["Queue", queueLines]].map(([heading, linesOf]) => {
      const known = new Set(other ? linesOf(other).map(textOf) : []);
      const lines = linesOf(step).map((line) => el("li", { className: known.has(textOf(line)) ? "" : "odd" }, line.map((part) => this.part(part))));
      return lines.length ? [el("h3", {}, heading), el("ul", { className: "plain" }, lines)] : [];
    });
    const rows = step.rows.length ? [el("h3", {}, "Rows"), this.rows(step, other)] : [];
    return el("div", {}, parts, lists[0], lists[1], rows, lists[2], this.two ? [] : this.meters(step, run));
  }

  part(part) {
    return typeof part === "string" ? part : el("span", { className: "chip" }, dot(this.trace.colour(part.adapter)), nameOf(part.adapter));
  }

  rows(step, other) {
    const known = new Set((other?.rows || []).map((row) => rowKey(row, other)));
    const withTokens = Boolean(step.tokens);
    const lines = step.rows.map((row) =>
      el(
        "tr",
        { className: known.has(rowKey(row, step)) ? "" : "odd" },
        el("td", { title: row.request }, short(row.request)),
        el("td", {}, dot(this.trace.colour(row.adapter)), " ", nameOf(row.adapter)),
        el("td", {}, whatOf(row)),
        withTokens && el("td", {}, givenTo(row.request, step)),
      ),
    );
    const names = ["request", "adapter", "computes", ...(withTokens ? ["gives"] : [])];
    return el("div", { className: "scroll" }, el("table", {}, el("tr", {}, names.map((text) => el("th", {}, text))), lines));
  }

  meters(step, run) {
    const { steps, room } = this.trace.runs[run];
    const held = step.slots.filter((adapter) => adapter !== null).length;
    const meter = (name, used, all, note) => {
      const bar = el("b");
      bar.style.width = `${all ? Math.min(100, (100 * used) / all) : 0}%`;
      return [el("span", {}, name), el("i", {}, bar), el("em", {}, note)];
    };
    const of = (used, all, unit) => `${used}${all ? ` of ${all}` : ""} ${unit}`;
    const slots = meter("slots", held, step.slots.length, of(held, step.slots.length, "slots") + (room.slot_bytes ? `, ${bytes(room.slot_bytes)} in all` : ""));
    const memory = meter("memory", step.in_memory || 0, room.adapters || Math.max(1, ...steps.map((each) => each.in_memory || 0)), of(step.in_memory || 0, room.adapters, "adapters"));
    const blocks = of(step.kv_blocks || 0, room.kv_blocks, "blocks") + (room.kv_block_bytes ? `, ${bytes(room.kv_block_bytes * (step.kv_blocks || 0))}` : "");
    const cache = meter("KV cache", step.kv_blocks || 0, room.kv_blocks, blocks);
    return [el("h3", {}, "Memory"), el("div", { className: "meter" }, slots, step.in_memory === undefined ? [] : [memory, cache])];
  }
}

// Since the engine's start: 3.25 s, and from a minute on 1:02:03 or 2:03.
const clock = (seconds) => {
  if (seconds < 60) return `${seconds.toFixed(2)} s`;
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  return parts.slice(parts[0] ? 0 : 1).map((part, place) => (place ? String(part).padStart(2, "0") : part)).join(":");
};
const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

const whatOf = (row) => {
  if (row.kind === "decode") return "decode";
  const tokens = `${counted(row.tokens, "token")} of prompt`;
  return row.cached ? `${tokens}; ${row.cached} were cached` : tokens;
};
// The token a request got: its text, or its id where there is no tokenizer.
const givenTo = (request, step) => {
  const text = step.texts?.[request], token = step.tokens[request];
  return text !== undefined ? JSON.stringify(text) : token === undefined ? "" : String(token);
};
const rowKey = (row, step) => JSON.stringify([row.request, row.adapter, row.slot, row.tokens, row.kind, row.cached, step.tokens?.[row.request]]);
const textOf = (line) => JSON.stringify(line);

function eventsOf(step) {
  const of = (adapter) => ({ adapter });
  return [
    ...(step.drops || []).map((name) => [of(name), " left memory for another"]),
    ...step.loads.map((name) => [of(name), " was read from disk"]),
    ...step.evictions.map((event) => [of(event.adapter), ` was evicted from slot ${event.slot}`]),
    ...step.activations.map((event) => [of(event.adapter), ` came into slot ${event.slot}`]),
    ...step.preempted.map((request) => [`${short(request)} was preempted: it waits again`]),
  ];
}

function slotLines(step) {
  return step.slots.map((held, slot) => {
    if (held === null) return [`${slot}: free`];
    return [`${slot}: `, { adapter: held }, step.pinned.includes(held) ? " pinned" : ""];
  });
}

function queueLines(step) {
  const skipped = new Map(step.skipped.map((skip) => [skip.request, skip]));
  const named = step.waiting.map((request) => {
    const skip = skipped.get(request);
    return skip ? [`${short(request)} `, { adapter: skip.adapter }, ` ${reasonOf(skip.reason)}`] : [`${short(request)}: its turn has not come`];
  });
  return step.more_waiting ? [...named, [`and ${step.more_waiting} more`]] : named;
}

const page = new Page(JSON.parse(document.getElementById("data").textContent));
