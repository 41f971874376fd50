// What the charts read: runs of an engine, their steps in columns that all runs share, and a colour an adapter.

const BASE = null;

class Trace {
  // data.runs: [{name, steps, room}]; data.columns: a row of step indices for each column, one a run, null = a gap
  constructor(data) {
    this.palette = data.palette;
    this.baseColour = data.base_colour;
    this.colours = new Map();
    this.runs = data.runs.map((run) => ({ name: run.name, room: run.room || {}, steps: run.steps }));
    this.pairs = data.columns || null;
    for (const name of [...new Set(this.runs.flatMap((run) => run.steps.flatMap(adaptersOf)))].sort(byCodePoint)) this.colour(name);
  }

  get length() {
    return this.pairs ? this.pairs.length : this.runs[0].steps.length;
  }

  at(column, run = 0) {
    const index = this.pairs ? this.pairs[column]?.[run] : column;
    return index === null || index === undefined ? null : this.runs[run].steps[index];
  }

  // The first time a name is asked for decides; a page that lives keeps its colours as adapters come.
  colour(adapter) {
    if (adapter === BASE) return this.baseColour;
    if (!this.colours.has(adapter)) this.colours.set(adapter, this.palette[this.colours.size] || furtherColour(this.colours.size));
    return this.colours.get(adapter);
  }

  // Tokens computed a second by adapter, over the steps that end with this one.
  rates(column, run = 0, width = 8) {
    const rates = new Map();
    const first = Math.max(0, column - width + 1);
    const seconds = this.secondsOf(first, column, run);
    if (!(seconds > 0)) return rates;
    for (let c = first; c <= column; c++)
      for (const row of this.at(c, run)?.rows || [])
        rates.set(row.adapter, (rates.get(row.adapter) || 0) + row.tokens / seconds);
    return rates;
  }

  // From the beginning of one step to the end of another. How long the last of all took nobody knows: as its neighbour.
  secondsOf(first, last, run) {
    const begun = this.at(first, run), next = this.at(last + 1, run), end = this.at(last, run);
    if (!begun || !end) return 0;
    if (next) return next.time_s - begun.time_s;
    const before = last > 0 ? this.at(last - 1, run) : null;
    return end.time_s - begun.time_s + (before ? end.time_s - before.time_s : 0);
  }

  counts(run = 0) {
    const steps = this.runs[run].steps;
    const rows = steps.flatMap((step) => step.rows);
    const sum = (count) => steps.reduce((total, step) => total + count(step), 0);
    return {
      steps: steps.length,
      requests: new Set(rows.map((row) => row.request)).size,
      adapters: new Set(steps.flatMap(adaptersOf)).size,
      tokens: rows.reduce((total, row) => total + row.tokens, 0),
      loads: sum((step) => step.loads.length),
      evictions: sum((step) => step.evictions.length),
      "times passed over": sum(numSkipped),
      preemptions: sum((step) => step.preempted.length),
    };
  }
}

const byCodePoint = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
const numSkipped = (step) => step.skipped.length + step.more_skipped;
const numWaiting = (step) => step.waiting.length + step.more_waiting;
const adaptersOf = (step) => [...step.slots, ...step.rows.map((row) => row.adapter)].filter((name) => name !== BASE);
const isEventful = (step) => step && (step.evictions.length || step.loads.length || step.preempted.length || (step.drops || []).length);
const nameOf = (adapter) => (adapter === BASE ? "base model" : adapter);

const REASONS = {
  max_loras: "no slot is free (max_loras)",
  "reload pending": "its adapter is to be read again",
  "adapter copy": "its adapter is being copied into a slot",
  "KV blocks": "no KV blocks are free",
};
const reasonOf = (reason) => REASONS[reason] || reason;

// Ids that a server makes up are long: what is left tells them apart, and the whole is a title away.
const short = (request) => request.replace(/([0-9a-f]{6})[0-9a-f]{20,}/g, "$1…");

function bytes(number) {
  const units = ["bytes", "KB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, number)) / 10)));
  return `${(number / 2 ** (10 * power)).toFixed(power && number < 10 * 2 ** (10 * power) ? 1 : 0)} ${units[power]}`;
}

// An element with properties, attributes (hyphens, or not a property) and children; strings become text, never markup.
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function dot(colour) {
  const made = el("span", { className: "dot" });
  made.style.background = colour;
  return made;
}

// For more adapters than the palette has colours: hues a golden angle apart, so that neighbours differ.
function furtherColour(place) {
  const hue = (place * 137.508) % 360, light = 0.38 + 0.1 * (place % 3);
  const part = (offset) => light - 0.55 * Math.min(light, 1 - light) * Math.max(-1, Math.min(((offset + hue / 30) % 12) - 3, 9 - ((offset + hue / 30) % 12), 1));
  return `#${[0, 8, 4].map((offset) => Math.round(255 * part(offset)).toString(16).padStart(2, "0")).join("")}`;
}
