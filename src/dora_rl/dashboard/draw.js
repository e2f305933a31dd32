// Drawing and words shared by the views: elements, numbers, colours, line charts, histograms.
// All text from a run goes through textContent; nothing is ever parsed as HTML.

export const COLOURS = 7;
const SERIES = 8;

// What the reader has chosen: which run of those that are served, and how much curves are smoothed.
export const chosen = { run: Number(new URLSearchParams(location.search).get("run") ?? 0), smoothing: 0 };

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export async function get(name, query = {}) {
  const answer = await fetch(`api/${name}?${new URLSearchParams({ run: chosen.run, ...query })}`);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? answer.statusText);
  return answer.json();
}

// -- numbers ------------------------------------------------------------------------------------

export function num(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return (value || 0).toLocaleString("en");
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${(value / (limit === 1e4 ? 1e3 : limit)).toPrecision(3)} ${unit}`;
  }
  if (size < 1e-9) return "0";
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const s = Math.round(value);
  const [hours, minutes] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return `${minutes} min ${String(s % 60).padStart(2, "0")} s`;
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;

export const bytes = (value) => (value ? `${num(value)}B` : "0 B");

// -- colours ------------------------------------------------------------------------------------

const known = new Map();
export function css(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return known.get(name);
}
export const themes = matchMedia("(prefers-color-scheme: dark)");
themes.addEventListener("change", () => known.clear());

export const versionColour = (version) => css(`--v${((version % COLOURS) + COLOURS) % COLOURS}`);

// Black or white, whichever reads better on a colour.
export function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#111111" : "#ffffff";
}

export function versionBadge(version) {
  const background = versionColour(version);
  return h("span", { class: "version", style: { background, color: inkOn(background) } }, `v${version}`);
}

// -- tips ---------------------------------------------------------------------------------------

export function tip(text, x, y) {
  const node = document.getElementById("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  const box = node.getBoundingClientRect();
  node.style.left = `${Math.min(x + 14, innerWidth - box.width - 8)}px`;
  node.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

// -- canvases -----------------------------------------------------------------------------------

export function prepare(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

export function ticks(low, high, most) {
  const span = high - low || 1;
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / size); k * size <= high + size * 1e-9; k++) found.push(k * size);
  return found;
}

const redraws = new Set();
const observer = new ResizeObserver((entries) => entries.forEach((e) => e.target.redraw?.()));
themes.addEventListener("change", () => redraws.forEach((canvas) => canvas.isConnected && canvas.redraw()));

export function keepDrawn(canvas, redraw) {
  for (const old of redraws) if (!old.isConnected && old !== canvas) redraws.delete(old);
  canvas.redraw = redraw;
  redraws.add(canvas);
  observer.observe(canvas);
}

const BOTTOM = 20;

// Room for the widest of the labels left of an axis.
const roomFor = (pen, labels) => Math.ceil(Math.max(20, ...labels.map((text) => pen.measureText(text).width))) + 10;

// Labels below an axis, [[where, text]]: none beyond the edge, none over the one before it.
function below(pen, labels, width, height) {
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  let free = 0;
  for (const [where, text] of labels) {
    const long = pen.measureText(text).width;
    const begin = Math.min(width - long - 1, Math.max(0, where - long / 2));
    if (begin < free) continue;
    pen.fillText(text, begin, height - 5);
    free = begin + long + 6;
  }
}

// Exponential means over the points: 0 leaves them, towards 1 they move less. The first points
// count in full, as the mean has nothing before them.
export function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Buttons that save a plot: as it is drawn, with its title and legend, and its points as a table.
function exports_(title, canvas, entries, rows) {
  const name = title.replaceAll(/[^\w.-]+/g, "_");
  const picture = () => {
    const ratio = devicePixelRatio || 1;
    const there = entries();
    const sheet = h("canvas", { width: canvas.width, height: canvas.height + (there.length > 1 ? 52 : 30) * ratio });
    const pen = sheet.getContext("2d");
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, sheet.width, sheet.height);
    pen.drawImage(canvas, 0, 26 * ratio);
    pen.scale(ratio, ratio);
    pen.fillStyle = css("--ink");
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(title, 8, 17);
    pen.font = "11px system-ui, sans-serif";
    let x = 8;
    for (const [text, colour] of there.length > 1 ? there : []) {
      const y = sheet.height / ratio - 8;
      pen.fillStyle = css(colour);
      pen.fillRect(x, y - 7, 10, 7);
      pen.fillStyle = css("--ink");
      pen.fillText(text, x + 14, y);
      x += 28 + pen.measureText(text).width;
    }
    sheet.toBlob((blob) => save(blob, `${name}.png`));
  };
  const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
  const table = () => save(new Blob([rows().map((row) => `${row.map((cell) => quoted(cell ?? "")).join(",")}\n`).join("")], { type: "text/csv" }), `${name}.csv`);
  const button = (text, what, onclick) => h("button", { type: "button", onclick, "aria-label": `save ${title} as ${what}` }, text);
  return h("span", { class: "exports" }, button("PNG", "a picture", picture), button("CSV", "a table", table));
}

// One row for each place of any line: what a spreadsheet wants.
function tableOf(lines, xName) {
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const at = lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
  return [[xName, ...lines.map((line) => line.name)], ...places.map((x) => [x, ...at.map((values) => values.get(x))])];
}

// A card with curves. `lines`: [{name, x, y, low?, high?, points?, dashed?}]; update() redraws in place.
export function lineChart(title, { small = false, note = "", zero = false, xName = "step", limits } = {}) {
  const canvas = h("canvas", { role: "img" });
  const legend = h("div", { class: "legend" });
  const tools = exports_(title, canvas, () => lines.map((line) => [line.name, line.colour]), () => tableOf(lines, xName));
  const card = h("section", { class: `card chart${small ? " small" : ""}` },
    h("h2", {}, title, h("span", { class: "quiet" }, note), tools), canvas, legend);
  let lines = [];
  let left = 46;
  let frame = null;

  function draw() {
    const { pen, width, height } = prepare(canvas);
    const shown = lines.filter((line) => line.x.length);
    const hgt = height - BOTTOM - 8;
    if (!shown.length || width < 80) {
      pen.fillStyle = css("--soft");
      pen.textAlign = "center";
      pen.fillText("nothing yet", width / 2, height / 2);
      frame = null;
      return;
    }
    const xs = shown.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    const values = shown.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]).filter((v) => v !== null);
    let [y0, y1] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
    if (!values.length) [y0, y1] = [0, 1];
    if (zero) y0 = Math.min(0, y0);
    if (limits) [y0, y1] = [Math.min(limits[0], y0), Math.max(limits[1], y1)];
    if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) / 2 || 0.5), y1 + (Math.abs(y1) / 2 || 0.5)];
    const pad = (y1 - y0) * 0.06;
    y1 += pad;
    if (!zero && !(limits && limits[0] === y0)) y0 -= pad;
    left = roomFor(pen, ticks(y0, y1, small ? 3 : 5).map((y) => num(y)));
    const w = width - left - 8;
    const X = (x) => left + ((x - x0) / (x1 - x0)) * w;
    const Y = (y) => 8 + hgt - ((y - y0) / (y1 - y0)) * hgt;
    frame = { X, x0, x1, w };
    axes(pen, { x0, x1, y0, y1, X, Y, width, height, small });
    for (const line of shown) drawLine(pen, line, X, Y);
  }

  function axes(pen, { x0, x1, y0, y1, X, Y, width, height, small: few }) {
    pen.strokeStyle = css("--line");
    pen.fillStyle = css("--soft");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const y of ticks(y0, y1, few ? 3 : 5)) {
      pen.beginPath();
      pen.moveTo(left, Y(y));
      pen.lineTo(width - 8, Y(y));
      pen.stroke();
      pen.fillText(num(y), left - 6, Y(y));
    }
    below(pen, ticks(x0, x1, few ? 4 : 8).filter((x) => Number.isInteger(x)).map((x) => [X(x), num(x)]), width, height);
  }

  function strokeCurve(pen, xs, ys, X, Y) {
    pen.beginPath();
    let broken = true;
    xs.forEach((x, i) => {
      if (ys[i] === null) { broken = true; return; }
      if (broken) pen.moveTo(X(x), Y(ys[i]));
      else pen.lineTo(X(x), Y(ys[i]));
      broken = false;
    });
    pen.stroke();
  }

  function drawLine(pen, line, X, Y) {
    pen.strokeStyle = pen.fillStyle = css(line.colour);
    if (line.low) {
      pen.globalAlpha = 0.16;
      pen.beginPath();
      line.x.forEach((x, i) => line.high[i] !== null && pen.lineTo(X(x), Y(line.high[i])));
      for (let i = line.x.length - 1; i >= 0; i--) if (line.low[i] !== null) pen.lineTo(X(line.x[i]), Y(line.low[i]));
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.setLineDash(line.dashed ? [5, 4] : []);
    if (chosen.smoothing && line.x.length > 2) {
      pen.globalAlpha = 0.25;
      strokeCurve(pen, line.x, line.y, X, Y);
      pen.globalAlpha = 1;
      strokeCurve(pen, line.x, smoothed(line.y, chosen.smoothing), X, Y);
    } else strokeCurve(pen, line.x, line.y, X, Y);
    pen.setLineDash([]);
    if (line.points || line.x.length === 1) {
      line.x.forEach((x, i) => {
        if (line.y[i] === null) return;
        pen.beginPath();
        pen.arc(X(x), Y(line.y[i]), 3, 0, 7);
        pen.fill();
      });
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!frame) return;
    const at = frame.x0 + ((event.offsetX - left) / frame.w) * (frame.x1 - frame.x0);
    const rows = lines.filter((line) => line.x.length).map((line) => {
      let best = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.x[best] - at)) best = i; });
      return [line.x[best], `${line.name}: ${num(line.y[best], 4)}`];
    });
    if (!rows.length) return;
    draw();
    const { pen, height } = { pen: canvas.getContext("2d"), height: canvas.clientHeight };
    pen.strokeStyle = css("--soft");
    pen.beginPath();
    pen.moveTo(frame.X(rows[0][0]), 8);
    pen.lineTo(frame.X(rows[0][0]), height - BOTTOM);
    pen.stroke();
    tip(`${xName} ${num(rows[0][0])}\n${rows.map((r) => r[1]).join("\n")}`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => { tip(""); draw(); });

  function update(found, over = xName) {
    xName = over;
    lines = found.map((line, i) => ({ colour: `--series-${i % SERIES}`, ...line }));
    legend.replaceChildren(...(lines.length > 1 ? lines.map((line) =>
      h("span", {}, h("i", { class: "line", style: { background: css(line.colour) } }), line.name)) : []));
    const last = lines.map((line) => `${line.name} ${num(line.y[line.y.length - 1])}`).join(", ");
    canvas.setAttribute("aria-label", `${title}; last: ${last || "nothing yet"}`);
    draw();
  }
  keepDrawn(canvas, draw);
  return { card, update };
}

// A card with stacked bars. `parts`: [{name, counts, colour?}], `labels`: one per bar.
export function barChart(title, { note = "", label = String, every = 1 } = {}) {
  const canvas = h("canvas", { role: "img" });
  const legend = h("div", { class: "legend" });
  const head = h("span", { class: "quiet" }, note);
  const tools = exports_(title, canvas, () => parts.map((part) => [part.name, part.colour]),
    () => [["from", ...parts.map((part) => part.name)], ...labels.map((from, i) => [from, ...parts.map((part) => part.counts[i])])]);
  const card = h("section", { class: "card chart" }, h("h2", {}, title, head, tools), canvas, legend);
  let [parts, labels, bound] = [[], [], null];
  let left = 46;

  function draw() {
    const { pen, width, height } = prepare(canvas);
    const total = labels.map((_, i) => parts.reduce((sum, part) => sum + part.counts[i], 0));
    const most = Math.max(...total, 0);
    left = roomFor(pen, ticks(0, most, 4).map((y) => num(y)));
    const [w, hgt] = [width - left - 8, height - BOTTOM - 8];
    pen.fillStyle = css("--soft");
    if (!most || w < 20) {
      pen.textAlign = "center";
      pen.fillText("nothing yet", width / 2, height / 2);
      return;
    }
    pen.strokeStyle = css("--line");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const y of ticks(0, most, 4)) {
      const at = 8 + hgt - (y / most) * hgt;
      pen.beginPath();
      pen.moveTo(left, at);
      pen.lineTo(width - 8, at);
      pen.stroke();
      pen.fillText(num(y), left - 6, at);
    }
    const size = w / labels.length;
    labels.forEach((text, i) => {
      let top = 8 + hgt;
      for (const part of parts) {
        const tall = (part.counts[i] / most) * hgt;
        pen.fillStyle = css(part.colour);
        if (part.counts[i]) pen.fillRect(left + i * size + Math.min(3, size * 0.12), top - Math.max(1, tall), size - Math.min(6, size * 0.24), Math.max(1, tall));
        top -= tall;
      }
    });
    pen.fillStyle = css("--soft");
    below(pen, labels.map((text, i) => [left + (i + 0.5) * size, label(text)]).filter((_, i) => i % every === 0), width, height);
    if (bound !== null && bound < labels.length) {
      const at = left + (bound + 1) * size;
      pen.strokeStyle = css("--bad");
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(at, 8);
      pen.lineTo(at, 8 + hgt);
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    const place = Math.floor(((event.offsetX - left) / (canvas.clientWidth - left - 8)) * labels.length);
    if (place < 0 || place >= labels.length) return tip("");
    const rows = parts.map((part) => `${part.name}: ${num(part.counts[place])}`);
    tip(`${label(labels[place], place)}\n${rows.join("\n")}`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => tip(""));
  keepDrawn(canvas, draw);
  return {
    card,
    update(names, found, { limit = null, text = note } = {}) {
      [labels, bound] = [names, limit];
      parts = found.map((part, i) => ({ colour: `--series-${i % SERIES}`, ...part }));
      head.textContent = text;
      legend.replaceChildren(...(parts.length > 1 ? parts.map((part) =>
        h("span", {}, h("i", { style: { background: css(part.colour) } }), part.name)) : []));
      canvas.setAttribute("aria-label", `${title}, ${text}`);
      draw();
    },
  };
}
