// Overview, learning curves, distributions, throughput.
import { barChart, bytes, chosen, css, get, h, lineChart, num, percent, seconds, versionBadge } from "./draw.js";

// -- overview -----------------------------------------------------------------------------------

function tile(label, figure) {
  const value = h("div", { class: "value", "data-figure": figure }, "–");
  const note = h("div", { class: "note" });
  const node = h("div", { class: "card tile" }, h("div", { class: "label" }, label), value, note);
  return {
    node,
    set(text, raw, more = "") {
      value.textContent = text;
      value.dataset.value = raw ?? "";
      note.replaceChildren(...[more].flat());
    },
  };
}

function promise(title, figure) {
  const mark = h("span", { class: "mark", "aria-hidden": "true" }, "·");
  const value = h("span", { class: "figure", "data-figure": figure });
  const note = h("div", { class: "quiet" });
  const node = h("div", { class: "card promise" }, mark, h("div", {}, h("b", {}, title), value, note));
  return {
    node,
    set(kind, text, raw, more) {
      mark.className = `mark ${kind}`;
      mark.textContent = { good: "✓", bad: "✗", warn: "–" }[kind];
      value.textContent = text;
      value.dataset.value = raw;
      note.textContent = more;
    },
  };
}

const STATE_COLOURS = {
  generating: "--v4", scoring: "--v3", ready: "--v1", taken: "--v0",
  trained: "--v2", filtered: "--soft", failed: "--v5", surplus: "--v6", lost: "--lost",
};

export function overview() {
  const tiles = {
    reward: tile("reward, last step", "reward_last"),
    evaluation: tile("evaluation, latest", "evaluation_last"),
    trained: tile("tokens trained", "tokens_trained"),
    rate: tile("tokens trained per second", "tokens_per_s"),
    staleness: tile("staleness, mean", "staleness_mean"),
    moves: tile("migrations", "migrations"),
  };
  const promises = {
    mixed: promise("One version per trajectory", "mixed"),
    discarded: promise("Nothing discarded", "discarded"),
    staleness: promise("Staleness bound", "staleness_max"),
  };
  const verdict = h("div", { class: "verdict", role: "status" });
  const findings = h("ul", { class: "plain" });
  const reward = lineChart("Reward", { note: "mean of each step" });
  const bar = h("div", { class: "states", role: "img" });
  const legend = h("div", { class: "legend" });
  const versions = h("p", {});
  const waiting = h("p", { class: "quiet" });
  const incidents = h("ul", { class: "plain" });
  const node = h("div", { class: "grid" },
    h("div", { class: "grid tiles" }, Object.values(tiles).map((t) => t.node)),
    h("div", { class: "grid three" }, Object.values(promises).map((p) => p.node)),
    h("section", { class: "card" }, h("h2", {}, "Audit", h("span", { class: "quiet" }, "every promise, proven from the log alone")), verdict, findings),
    h("div", { class: "grid two" }, reward.card,
      h("section", { class: "card" }, h("h2", {}, "Groups", h("span", { class: "quiet" }, "issued = ended + outstanding")), bar, legend, versions, waiting)),
    h("section", { class: "card" }, h("h2", {}, "Incidents", h("span", { class: "quiet" }, "latest first")), incidents));

  function showFigures(run) {
    const { y } = run.rewards;
    const p = run.promises;
    tiles.reward.set(num(y.at(-1)), y.at(-1), y.length ? `first ${num(y[0])}` : "");
    const [name, last] = headlineOf(run.evaluation);
    const failed = run.evaluation?.["eval/num_failed"] ? `; ${num(run.evaluation["eval/num_failed"])} of ${num(run.evaluation["eval/num_answers"])} answers failed` : "";
    tiles.evaluation.set(name && last === null ? "failed" : num(last), last, name ? `${name.replace("eval/", "")}, first ${num(run.evaluation_first[name])}${failed}` : "none yet");
    tiles.trained.set(num(run.tokens_trained), run.tokens_trained, `${num(run.tokens_generated)} generated`);
    tiles.rate.set(num(run.tokens_per_s), run.tokens_per_s, "of training time, start-up not counted");
    tiles.staleness.set(num(p.staleness_mean), p.staleness_mean, `of at most ${run.max_staleness}`);
    tiles.moves.set(num(run.migrations), run.migrations, `${bytes(run.kv_bytes_moved)} of KV cache`);
    promises.mixed.set(p.mixed ? (p.mixed_given_up ? "warn" : "bad") : "good", `${num(p.mixed)} mixed`, p.mixed,
      `of ${num(p.samples)} trained samples${p.mixed_given_up ? "; this mode does not promise it" : ""}`);
    promises.discarded.set(p.discarded ? "warn" : "good", `${num(p.discarded)} groups`, p.discarded,
      `${num(p.discarded_tokens)} tokens in failed samples and in failed, surplus or lost groups${p.discarded_given_up ? "; this mode does not promise it" : ""}`);
    promises.staleness.set(p.staleness_max > run.max_staleness ? "bad" : "good",
      `${p.staleness_max} ≤ ${run.max_staleness}`, p.staleness_max, "oldest version trained, behind its step");
    reward.update([{ name: "reward", ...run.rewards }]);
  }

  function showGroups(run) {
    const total = Object.values(run.states).reduce((a, b) => a + b, 0);
    const there = Object.entries(run.states).filter(([, count]) => count);
    bar.setAttribute("aria-label", there.map(([state, count]) => `${count} ${state}`).join(", "));
    bar.replaceChildren(...there.map(([state, count]) =>
      h("span", { title: `${num(count)} ${state}`, style: { width: `${(100 * count) / total}%`, background: css(STATE_COLOURS[state]) } })));
    legend.replaceChildren(...Object.entries(run.states).map(([state, count]) =>
      h("a", { href: `#groups?state=${state}`, class: "quiet" },
        h("i", { style: { background: css(STATE_COLOURS[state]) } }), `${state} `,
        h("b", { "data-figure": `state_${state}`, "data-value": count }, num(count)))));
    versions.replaceChildren("live versions ", ...run.versions.flatMap((v) => [versionBadge(v), " "]));
    const w = run.waiting;
    waiting.textContent = w ? `step ${w.step} waits for group ${w.groups.join(", ")} since ${seconds(run.now - w.since)}` : "the trainer waits for no older group";
  }

  function showAudit({ audit, num_entries: all }) {
    const wrong = audit.num_findings ?? 0;
    const read = `${num(audit.num_entries)} of ${num(all)} entries`;
    const [kind, text, more] = wrong ? ["bad", `${num(wrong)} findings`, read]
      : audit.state === "whole" ? ["good", "every promise was kept", `${num(audit.num_entries)} entries, the whole run`]
      : audit.state === "so far" ? ["good", "no promise broken so far", read]
      : audit.state === "reading" ? ["", "auditing …", read]
      : audit.state === "damaged" ? ["bad", "the log is damaged", `after ${num(audit.num_entries)} entries`]
      : ["warn", "no audit", "run dora-rl audit"];
    verdict.dataset.state = audit.state;
    verdict.dataset.findings = wrong;
    verdict.replaceChildren(h("span", { class: `pill ${kind}` }, text), h("span", { class: "quiet" }, more));
    findings.replaceChildren(...(audit.findings ?? []).map((f) =>
      h("li", {}, h("b", {}, `${f.promise}: `), `${f.subject}: ${f.message} `, h("span", { class: "quiet" }, `entry ${f.entry}`))));
  }

  return {
    node,
    async refresh(run) {
      showFigures(run);
      showGroups(run);
      showAudit(run);
      incidents.replaceChildren(...(run.incidents.length ? run.incidents.map((i) =>
        h("li", {}, h("span", { class: "quiet" }, `${seconds(i.now)}  `), h("b", {}, `${i.instance} ${i.kind} `), i.text))
        : [h("li", { class: "quiet" }, "none")]));
    },
  };
}

// The evaluation that stands for the others: the one a user would quote.
const HEADLINES = ["eval/sampled", "eval/accuracy", "eval/reward", "eval/mean", "eval/greedy"];
export function headlineOf(line) {
  if (!line) return ["", null];
  const name = HEADLINES.find((n) => n in line) ?? Object.keys(line).find((n) => n.startsWith("eval/"));
  return name ? [name, line[name]] : ["", null];
}

// -- learning -----------------------------------------------------------------------------------

const NOT_SCORES = /length|num_prompts|num_samples|num_answers|num_failed/;

export function learning() {
  const reward = lineChart("Training reward", { note: "mean of each step" });
  const evaluation = lineChart("Evaluation", { note: "held-out prompts, by version", limits: [0, 1], xName: "version" });
  const filter = h("input", { type: "search", placeholder: "filter metrics", "aria-label": "filter metrics" });
  const count = h("span", { class: "quiet" });
  const grid = h("div", { class: "grid four" });
  const charts = new Map();
  let last = null;
  filter.addEventListener("input", () => last && showAll(last));
  const smoothing = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.smoothing, "aria-label": "smoothing",
    oninput: () => { chosen.smoothing = Number(smoothing.value); last && draw(); } });
  const node = h("div", { class: "grid" }, h("div", { class: "grid two" }, reward.card, evaluation.card),
    h("div", { class: "controls" }, h("h2", { style: { margin: 0 } }, "All metrics"), filter, count, h("span", { class: "spring" }), h("label", {}, "smoothing ", smoothing)), grid);

  function draw() {
    reward.update([{ name: "reward", ...last.steps["reward/mean"] }]);
    evaluation.update(Object.entries(last.evaluations).filter(([name]) => !NOT_SCORES.test(name))
      .map(([name, curve], i) => ({ name: name.replace("eval/", ""), points: true, dashed: i >= 8, ...curve })));
    showAll(last);
  }

  function showAll(found) {
    const names = Object.keys(found.steps).filter((name) => name !== "reward/mean" && name.includes(filter.value.trim()));
    for (const name of names) {
      if (!charts.has(name)) charts.set(name, lineChart(name, { small: true }));
    }
    count.textContent = `${names.length} metrics`;
    const wanted = names.map((name) => charts.get(name).card);
    if (wanted.length !== grid.children.length || wanted.some((card, i) => grid.children[i] !== card)) grid.replaceChildren(...wanted);
    for (const name of names) charts.get(name).update([{ name, ...found.steps[name] }]);
  }

  return {
    node,
    async refresh() {
      last = await get("metrics");
      draw();
    },
  };
}

// -- distributions ------------------------------------------------------------------------------

export function distributions() {
  const staleness = barChart("Staleness", { label: (k) => String(k) });
  const lengths = barChart("Response length, tokens", { every: 6, label: (k, i) => (i === undefined ? num(k) : `${num(k)} tokens and more`) });
  const rewards = barChart("Reward of samples", { every: 4, label: (k) => num(k, 2) });
  const stale = lineChart("Staleness over steps", { zero: true });
  const long = lineChart("Response length over steps", { zero: true });
  const node = h("div", { class: "grid" }, h("div", { class: "grid three" }, staleness.card, lengths.card, rewards.card),
    h("div", { class: "grid two" }, stale.card, long.card));
  return {
    node,
    async refresh() {
      const [found, curves] = await Promise.all([get("distributions"), get("metrics")]);
      const top = Math.max(found.max_staleness + 1, found.staleness.length);
      const counts = Array.from({ length: top }, (_, k) => found.staleness[k] ?? 0);
      staleness.update(counts.map((_, k) => k), [{ name: "groups", counts }],
        { limit: found.max_staleness, text: `${num(found.num_trained)} trained groups; bound K = ${found.max_staleness}` });
      staleness.card.dataset.counts = JSON.stringify(found.staleness);
      const q = found.length_quantiles;
      lengths.update(found.length_edges.slice(0, -1), Object.entries(found.lengths).map(([name, counts]) => ({ name, counts })),
        { text: `median ${num(Math.round(q.p50))}, p99 ${num(Math.round(q.p99))}, longest ${num(found.length_max)}` });
      lengths.card.dataset.samples = found.num_samples;
      rewards.update(found.reward_edges.slice(0, -1), [{ name: "samples", counts: found.rewards }], { text: `${num(found.num_samples)} samples` });
      const s = curves.steps;
      stale.update([{ name: "mean", ...s["staleness/mean"] }, { name: "max", dashed: true, ...s["staleness/max"] }]);
      long.update(["median", "mean", "p99", "max"].filter((n) => `response_length/${n}` in s).map((n) => ({ name: n, ...s[`response_length/${n}`] })));
    },
  };
}

// -- throughput ---------------------------------------------------------------------------------

export function throughput() {
  const rate = lineChart("Response tokens trained per second", { zero: true });
  const time = lineChart("Time of a step, seconds", { zero: true });
  const body = h("tbody");
  const notes = h("div", { class: "grid tiles" });
  const idle = { device: tile("GPU idle", "device_idle"), cpu: tile("CPU not used", "cpu_unused"), trainer: tile("trainer idle", "trainer_idle"), rollout: tile("rollout idle", "rollout_idle"), running: tile("requests running, mean", "running"), drafts: tile("guessed tokens that were right", "accepted") };
  notes.append(...Object.values(idle).map((t) => t.node));
  const head = ["instance", "slots", "requests running", "without a request", "not computing"].map((t, i) => h("th", { class: i ? "num" : "", scope: "col" }, t));
  const node = h("div", { class: "grid" }, notes, h("div", { class: "grid two" }, rate.card, time.card),
    h("section", { class: "card" }, h("h2", {}, "Instances", h("span", { class: "quiet" }, "means over the whole run; “not computing” is what the worker measured, over the training time")),
      h("table", {}, h("thead", {}, h("tr", {}, head)), body)));
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  return {
    node,
    async refresh() {
      const found = await get("throughput");
      const measured = found.instances.map((i) => i.idle).filter((v) => v !== null);
      const rollout = found.rollout_idle ?? mean(found.instances.map((i) => i.empty));
      const atEnd = found.cpu_unused === null ? "known at the end" : null;
      idle.device.set(percent(found.device_idle), found.device_idle, found.device_idle === null ? atEnd ?? "the run used none" : "training time without a kernel");
      idle.cpu.set(percent(found.cpu_unused), found.cpu_unused, atEnd ?? "of the cores' time, since the last start");
      idle.trainer.set(percent(found.trainer_idle), found.trainer_idle, found.trainer_idle === null ? "not measured" : "measured by the learner");
      idle.rollout.set(percent(rollout), rollout, measured.length ? "measured by the instances" : "time without a request");
      const running = found.instances.reduce((sum, i) => sum + i.running, 0);
      idle.running.set(num(running), running, `on ${found.instances.length} instances`);
      idle.drafts.set(found.drafted ? percent(found.accepted / found.drafted) : "none", found.accepted, `${num(found.accepted)} of ${num(found.drafted)}`);
      rate.update([{ name: "tokens/s", ...found.curves["perf/tokens_per_s"] }]);
      const parts = { "time/step": "step", "time/train": "train", "time/wait_for_batch": "wait for batch", "time/weight_sync": "publish" };
      time.update(Object.entries(parts).filter(([name]) => name in found.curves).map(([name, text]) => ({ name: text, ...found.curves[name] })));
      body.replaceChildren(...found.instances.map((i) => h("tr", {}, h("td", {}, i.name), h("td", { class: "num" }, num(i.slots)),
        h("td", { class: "num" }, num(i.running)), h("td", { class: "num" }, percent(i.empty)), h("td", { class: "num" }, percent(i.idle)))));
    },
  };
}
