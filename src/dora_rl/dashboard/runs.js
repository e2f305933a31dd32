// Runs side by side, and the configuration of the one that is open.
import { chosen, get, h, lineChart, num, percent, seconds } from "./draw.js";
import { headlineOf } from "./views.js";

const AXES = { step: "steps", seconds: "seconds of the run", tokens: "tokens trained" };
const CURVES = ["reward/mean", "eval/sampled", "perf/tokens_per_s", "time/step", "staleness/mean", "response_length/mean"];

// A curve whose places are steps, over another axis. Its points beyond the axis are left out.
function over(curve, axis, versions) {
  if (!axis) return curve;
  const x = curve.x.map((place) => at(axis, versions ? place - 1 : place));
  const there = x.map((value) => value !== null);
  const pick = (values) => values?.filter((_, i) => there[i]);
  return { ...curve, x: pick(x), y: pick(curve.y), low: pick(curve.low), high: pick(curve.high) };
}

// The axis at a step; version 0 was there before the first step. Between its points: in proportion.
function at({ x, y }, step) {
  if (step < 0) return 0;
  const after = x.findIndex((value) => value >= step);
  if (after < 0 || y[after] === null) return null;
  if (x[after] === step || after === 0) return y[after];
  const before = after - 1;
  return y[before] === null ? null : y[before] + ((y[after] - y[before]) * (step - x[before])) / (x[after] - x[before]);
}

// Names of runs, told apart where two are the same.
export function namesOf(runs) {
  return runs.map((run, i) => (runs.filter((r) => r.name === run.name).length > 1 ? `${run.name} (${i + 1})` : run.name));
}

export function compare() {
  const body = h("tbody");
  const columns = [["run", 0], ["state", 0], ["mode", 0], ["K", 1], ["steps", 1], ["time", 1], ["reward, last", 1], ["evaluation, first → latest", 1], ["tokens trained", 1], ["tokens/s", 1], ["staleness", 1], ["discarded", 1]];
  const head = columns.map(([text, right]) => h("th", { class: right ? "num" : "", scope: "col" }, text));
  const axis = h("select", { onchange: () => draw() }, Object.entries(AXES).map(([value, text]) => h("option", { value }, text)));
  const more = h("select", { onchange: () => draw(), "aria-label": "one more metric" });
  const grid = h("div", { class: "grid two" });
  const differ = h("tbody");
  const differHead = h("tr");
  const same = h("p", { class: "quiet" });
  const node = h("div", { class: "grid" },
    h("section", { class: "card scroll" }, h("h2", {}, "Runs"), h("table", {}, h("thead", {}, h("tr", {}, head)), body)),
    h("div", { class: "controls" }, h("label", {}, "over ", axis), h("label", {}, "and ", more)), grid,
    h("section", { class: "card scroll" }, h("h2", {}, "Where their settings differ"), same, h("table", {}, h("thead", {}, differHead), differ)));
  const charts = new Map();
  const hidden = new Set();
  let [runs, found] = [[], []];

  function row(run, name, i) {
    const [metric, last] = headlineOf(run.evaluation);
    const scores = metric ? `${num(run.evaluation_first[metric])} → ${last === null ? "failed" : num(last)}` : "–";
    const shown = h("input", { type: "checkbox", checked: !hidden.has(i), "aria-label": `draw ${name}`, onchange: (event) => { event.target.checked ? hidden.delete(i) : hidden.add(i); draw(); } });
    const cells = [num(run.max_staleness), `${num(run.step)} of ${num(run.num_steps)}`, seconds(run.now), num(run.rewards.y.at(-1)), scores,
      num(run.tokens_trained), num(run.tokens_per_s), num(run.promises.staleness_mean), num(run.promises.discarded)];
    return h("tr", { "data-run": i }, h("td", {}, h("label", {}, shown, " ", h("a", { href: `?run=${i}#overview` }, name))),
      h("td", {}, run.error || (run.share_read < 1 ? `reading, ${percent(run.share_read)}` : run.status)), h("td", {}, run.mode),
      cells.map((text) => h("td", { class: "num" }, text)));
  }

  // Of all curves, those of steps and of versions; the same place has the same colour in every plot.
  function draw() {
    const names = namesOf(runs);
    const known = [...new Set(found.flatMap((f) => [...Object.keys(f.steps), ...Object.keys(f.evaluations)]))].sort();
    const extra = known.filter((name) => !CURVES.includes(name));
    const before = more.value;
    if (more.options.length !== extra.length + 1) more.replaceChildren(h("option", { value: "" }, "one more metric"), ...extra.map((name) => h("option", { value: name }, name)));
    more.value = extra.includes(before) ? before : "";
    const wanted = [...CURVES.filter((name) => known.includes(name)), ...(more.value ? [more.value] : [])];
    for (const name of wanted) if (!charts.has(name)) charts.set(name, lineChart(name, {}));
    const cards = wanted.map((name) => charts.get(name).card);
    if (cards.length !== grid.children.length || cards.some((card, i) => grid.children[i] !== card)) grid.replaceChildren(...cards);
    for (const name of wanted) charts.get(name).update(linesOf(name, names), AXES[axis.value]);
  }

  function linesOf(name, names) {
    return found.flatMap((f, i) => {
      const curve = f.steps[name] ?? f.evaluations[name];
      if (!curve || hidden.has(i)) return [];
      const place = over(curve, axis.value === "step" ? null : f.axes[axis.value], !(name in f.steps));
      return [{ name: names[i], colour: `--series-${i % 8}`, dashed: i >= 8, points: !(name in f.steps), ...place }];
    });
  }

  async function showSettings() {
    const configs = await Promise.all(runs.map((_, i) => get("config", { run: i })));
    const tables = configs.map((rows) => new Map(rows.map((r) => [r.key, r.value])));
    const keys = [...new Set(tables.flatMap((t) => [...t.keys()]))].sort();
    const told = (value) => (value === undefined ? "–" : JSON.stringify(value));
    const differing = keys.filter((key) => new Set(tables.map((t) => told(t.get(key)))).size > 1);
    differHead.replaceChildren(...["key", ...namesOf(runs)].map((text) => h("th", { scope: "col" }, text)));
    differ.replaceChildren(...differing.map((key) => h("tr", { "data-key": key }, h("td", {}, key), tables.map((t) => h("td", {}, told(t.get(key)))))));
    same.textContent = differing.length ? "" : runs.length > 1 ? "Nowhere." : "There is one run; give several to dora-rl dashboard.";
  }

  return {
    node,
    async refresh() {
      runs = await get("runs");
      found = await Promise.all(runs.map((_, i) => get("metrics", { run: i })));
      body.replaceChildren(...namesOf(runs).map((name, i) => row(runs[i], name, i)));
      draw();
      await showSettings();
    },
  };
}

export function config() {
  const filter = h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys", oninput: () => draw() });
  const only = h("input", { type: "checkbox", checked: true, onchange: () => draw() });
  const count = h("span", { class: "quiet", "data-figure": "config_keys" });
  const body = h("tbody");
  const head = ["key", "value", "default"].map((text) => h("th", { scope: "col" }, text));
  const node = h("section", { class: "card scroll" },
    h("div", { class: "controls" }, h("h2", { style: { margin: 0 } }, "Configuration"), filter, h("label", {}, only, " only what differs from the default"), h("span", { class: "spring" }), count),
    h("table", {}, h("thead", {}, h("tr", {}, head)), body));
  let rows = [];

  function draw() {
    const shown = rows.filter((r) => r.key.includes(filter.value.trim()) && (r.changed || !only.checked));
    count.textContent = `${num(shown.length)} of ${num(rows.length)} keys`;
    count.dataset.value = shown.length;
    body.replaceChildren(...shown.map((r) => h("tr", { "data-key": r.key }, h("td", {}, r.changed ? h("b", {}, r.key) : r.key),
      h("td", { class: "wide" }, JSON.stringify(r.value)), h("td", { class: "quiet" }, r.changed ? JSON.stringify(r.default) : ""))));
    if (!rows.length) body.replaceChildren(h("tr", {}, h("td", { class: "quiet" }, "This run has no config.json.")));
  }

  return {
    node,
    async refresh() {
      rows = await get("config", { run: chosen.run });
      draw();
    },
  };
}
