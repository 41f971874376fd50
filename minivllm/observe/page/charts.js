// Canvases over one axis of steps. Each chart draws the columns [from, to) of one run.

class Chart {
  constructor(page, run, heightOf, draw) {
    Object.assign(this, { page, run, heightOf, draw });
    this.canvas = el("canvas", { tabIndex: -1 });
    this.canvas.addEventListener("pointerdown", (event) => this.pick(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.pick(event));
  }

  pick(event) {
    const box = this.canvas.getBoundingClientRect();
    const { from, to } = this.page.view();
    this.page.go(Math.floor(from + ((event.clientX - box.left) / box.width) * (to - from)));
  }

  // What is drawn stays as it is while only the cursor moves: a long trace is drawn once.
  render(view) {
    const { page, canvas } = this;
    const width = canvas.clientWidth, height = this.heightOf(this), ratio = window.devicePixelRatio || 1;
    if (!width) return;
    const column = width / Math.max(1, view.to - view.from);
    const area = { width, height, column, ...view, x: (c) => (c - view.from) * column, ink: page.ink, focus: page.focus };
    const key = [width, height, ratio, view.from, view.to, page.drawn].join();
    if (key !== this.key) {
      this.key = key;
      this.still = document.createElement("canvas");
      this.draw({ ...area, pen: pen(this.still, area, ratio) }, page.trace, this.run);
      canvas.style.height = `${height}px`;
    }
    const top = pen(canvas, area, ratio);
    top.drawImage(this.still, 0, 0, width, height);
    this.cursor({ ...area, pen: top });
  }

  cursor({ pen, x, column, height, ink }) {
    const at = x(this.page.column);
    pen.globalAlpha = 1;
    pen.strokeStyle = ink.ink;
    pen.lineWidth = 1;
    if (column >= 6) pen.strokeRect(at + 0.5, 0.5, column - 1, height - 1);
    else pen.strokeRect(at + column / 2, 0, 0.01, height);
  }
}

function pen(canvas, { width, height }, ratio) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const made = canvas.getContext("2d");
  made.scale(ratio, ratio);
  made.font = "11px system-ui, sans-serif";
  made.textBaseline = "middle";
  return made;
}

const SLOT = 24;
const slotsOf = (trace, run) => Math.max(0, ...trace.runs[run].steps.map((step) => step.slots.length));
const slotHeight = (chart) => {
  const slots = slotsOf(chart.page.trace, chart.run);
  return Math.max(SLOT, slots * (slots > 12 ? Math.max(7, 288 / slots) : SLOT));
};

// Stretches of columns for which a value, as text, stays the same.
function* stretches(from, to, valueOf) {
  let start = from, value = valueOf(from);
  for (let c = from + 1; c <= to; c++) {
    const next = c < to ? valueOf(c) : undefined;
    if (c < to && next === value) continue;
    yield [start, c, value];
    [start, value] = [c, next];
  }
}

function drawSlots(area, trace, run) {
  const { pen, from, to, x, width, ink } = area;
  const slots = slotsOf(trace, run), tall = slots ? area.height / slots : area.height;
  for (let slot = 0; slot < slots; slot++) {
    const top = slot * tall + 1, high = tall - 3;
    pen.fillStyle = ink.lane;
    pen.fillRect(0, top, width, high);
    const held = (c) => trace.at(c, run)?.slots[slot] ?? null;
    const used = (c) => (trace.at(c, run)?.rows || []).some((row) => row.slot === slot);
    for (const [start, end, key] of stretches(from, to, (c) => (held(c) === null ? "" : (used(c) ? "+" : "-") + held(c)))) {
      if (!key) continue;
      pen.globalAlpha = shade(area, key.slice(1)) * (key[0] === "+" ? 1 : 0.32);
      pen.fillStyle = trace.colour(key.slice(1));
      pen.fillRect(x(start), top, x(end) - x(start), high);
      pen.globalAlpha = 1;
    }
    for (const [start, end, adapter] of stretches(from, to, held)) {
      if (adapter !== null && high > 11) label(area, adapter, x(start), x(end), top, high);
    }
    for (const [start, end, pin] of stretches(from, to, (c) => held(c) !== null && trace.at(c, run).pinned.includes(held(c)))) {
      if (!pin) continue;
      pen.strokeStyle = ink.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x(start) + 1, top + 1, x(end) - x(start) - 2, high - 2);
    }
  }
  for (let c = from; c < to; c++) {
    const step = trace.at(c, run);
    for (const event of step?.evictions || []) cross(area, x(c), (event.slot + 0.5) * tall - 1);
    for (const event of step?.activations || [])
      if (step.loads.includes(event.adapter)) arrow(area, x(c), event.slot * tall + 2);
  }
}

// The name lies on stretches of several shades, so its letters have an outline.
function label(area, text, left, right, top, high) {
  const { pen, width, ink } = area;
  const start = Math.max(0, left) + 7;
  if (Math.min(width, right) - start < 26) return;
  pen.save();
  pen.beginPath();
  pen.rect(start, top, Math.min(width, right) - start - 3, high);
  pen.clip();
  pen.font = "600 11px system-ui, sans-serif";
  pen.strokeStyle = ink.card;
  pen.lineWidth = 3;
  pen.lineJoin = "round";
  pen.strokeText(text, start + 2, top + high / 2 + 0.5);
  pen.fillStyle = ink.ink;
  pen.fillText(text, start + 2, top + high / 2 + 0.5);
  pen.restore();
}

const shade = (area, adapter) => (area.focus === undefined || area.focus === adapter ? 1 : 0.15);

function cross({ pen, ink }, x, y) {
  pen.lineCap = "round";
  for (const [colour, width] of [[ink.card, 5], [ink.ink, 2]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(x - 4, y - 4); pen.lineTo(x + 4, y + 4); pen.moveTo(x - 4, y + 4); pen.lineTo(x + 4, y - 4);
    pen.stroke();
  }
}

function arrow({ pen, ink }, x, y) {
  pen.beginPath();
  pen.moveTo(x - 5, y); pen.lineTo(x + 5, y); pen.lineTo(x, y + 7);
  pen.closePath();
  pen.fillStyle = ink.ink;
  pen.strokeStyle = ink.card;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.fill();
}

const rowsHeight = (chart) => Math.max(36, Math.min(150, 10 * mostRows(chart.page.trace)));
const mostRows = (trace) => Math.max(1, ...trace.runs.flatMap((run) => run.steps.map((step) => step.rows.length)));

function drawRows(area, trace, run) {
  const { pen, from, to, x, height, column, ink } = area;
  const high = height / mostRows(trace), gap = high > 4 ? 1 : 0, side = column > 4 ? 1 : 0;
  pen.fillStyle = ink.lane;
  pen.fillRect(0, 0, area.width, height);
  for (let c = from; c < to; c++) {
    (trace.at(c, run)?.rows || []).forEach((row, place) => {
      const top = height - (place + 1) * high;
      pen.globalAlpha = shade(area, row.adapter);
      pen.fillStyle = trace.colour(row.adapter);
      pen.fillRect(x(c), top, Math.max(1, column - side), high - gap);
      if (row.kind !== "decode" && high > 3) {
        pen.fillStyle = ink.card;
        pen.fillRect(x(c) + column * 0.3, top + high * 0.3, Math.max(1, column * 0.4 - side), high * 0.4 - gap / 2);
      }
    });
  }
  pen.globalAlpha = 1;
}

const QUEUE = 70;

function drawQueue(area, trace, run) {
  const { pen, from, to, x, height, column, ink } = area;
  const steps = trace.runs.flatMap((each) => each.steps);
  const most = Math.max(1, ...steps.map(numWaiting), ...steps.map((step) => step.running));
  const scale = (height - 4) / most;
  grid(area, most, scale);
  for (let c = from; c < to; c++) {
    const step = trace.at(c, run);
    if (!step) continue;
    for (const [colour, number] of [[ink.waiting, numWaiting(step)], [ink.skipped, numSkipped(step)]]) {
      pen.fillStyle = colour;
      pen.fillRect(x(c), height - number * scale, Math.max(1, column + 0.3), number * scale);
    }
  }
  line(area, ink.accent, (c) => trace.at(c, run)?.running ?? null, scale);
  edge(area, String(most));
}

function grid({ pen, width, height, ink }, most, scale) {
  pen.strokeStyle = ink.line;
  pen.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(height - most * part * scale) - (part === 0 ? 0.5 : -0.5);
    pen.beginPath(); pen.moveTo(0, y); pen.lineTo(width, y); pen.stroke();
  }
}

function edge({ pen, width, ink }, text) {
  pen.textAlign = "right";
  pen.lineWidth = 3;
  pen.strokeStyle = ink.card;
  pen.strokeText(text, width - 3, 9);
  pen.fillStyle = ink.soft;
  pen.fillText(text, width - 3, 9);
  pen.textAlign = "left";
}

function line(area, colour, valueOf, scale) {
  const { pen, from, to, x, height } = area;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.8;
  pen.beginPath();
  let down = false;
  for (let c = from; c < to; c++) {
    const value = valueOf(c);
    if (value !== null) {
      const y = height - value * scale - 1;
      if (down) pen.lineTo(x(c), y);
      else pen.moveTo(x(c), y);
      pen.lineTo(x(c + 1), y);
    }
    down = value !== null;
  }
  pen.stroke();
}

const RATES = 90;

function drawRates(area, trace, run) {
  const { pen, from, to, x, height, column } = area;
  const rates = [];
  for (let c = from; c < to; c++) rates.push(trace.rates(c, run));
  const total = (rate) => [...rate.values()].reduce((sum, each) => sum + each, 0);
  const most = Math.max(1, ...rates.map(total)), scale = (height - 4) / most;
  const names = [BASE, ...trace.colours.keys()];
  grid(area, most, scale);
  rates.forEach((rate, index) => {
    let floor = height;
    for (const name of names) {
      const high = (rate.get(name) || 0) * scale;
      pen.globalAlpha = shade(area, name);
      pen.fillStyle = trace.colour(name);
      pen.fillRect(x(from + index), floor - high, Math.max(1, column + 0.3), high);
      floor -= high;
    }
  });
  pen.globalAlpha = 1;
  edge(area, `${Math.round(most).toLocaleString("en")} tokens/s`);
}

const MEMORY = 70;
const TIERS = [
  ["slots", "#0072B2", (step, room) => step.slots.filter((held) => held !== null).length / Math.max(1, step.slots.length)],
  ["adapters in memory", "#E69F00", (step, room, most) => (step.in_memory || 0) / (room.adapters || most.adapters)],
  ["KV cache", "#009E73", (step, room, most) => (step.kv_blocks || 0) / (room.kv_blocks || most.blocks)],
];

function drawMemory(area, trace, run) {
  const { steps, room } = trace.runs[run];
  const most = {
    adapters: Math.max(1, ...steps.map((step) => step.in_memory || 0)),
    blocks: Math.max(1, ...steps.map((step) => step.kv_blocks || 0)),
  };
  const scale = area.height - 6;
  grid(area, 1, scale);
  TIERS.forEach(([, colour, part], place) => {
    const value = (c) => (trace.at(c, run) ? part(trace.at(c, run), room, most) : null);
    area.pen.setLineDash([[], [6, 3], [2, 2]][place]);
    line(area, colour, value, scale);
  });
  area.pen.setLineDash([]);
  edge(area, "full");
}

// Where two runs are not alike.
function drawDifferences(area, trace) {
  const { pen, from, to, x, height, column, ink, width } = area;
  pen.fillStyle = ink.lane;
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = "#D55E00";
  for (let c = from; c < to; c++) if (trace.differs.has(c)) pen.fillRect(x(c), 0, Math.max(1.5, column - (column > 4)), height);
}
