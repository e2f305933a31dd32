// The list of groups, one group with its samples, and reading a trajectory token by token.
import { get, h, num, seconds, tip, versionBadge } from "./draw.js";

const STATES = ["generating", "scoring", "ready", "taken", "trained", "filtered", "failed", "surplus", "lost"];
const ORDERS = { newest: "newest first", oldest: "oldest first", longest: "most tokens", best: "best reward", worst: "worst reward", moved: "most moves" };
const KINDS = { trained: "good", failed: "bad", surplus: "warn", lost: "warn", filtered: "warn", generating: "live", taken: "finished" };
const SIZE = 50;

function choose(label, options, onchange) {
  const select = h("select", { onchange }, options.map(([value, text]) => h("option", { value }, text)));
  return [select, h("label", {}, `${label} `, select)];
}

export function groups() {
  const query = new URLSearchParams();
  const go = (changes) => {
    for (const [name, value] of Object.entries({ page: "", ...changes })) value === "" ? query.delete(name) : query.set(name, value);
    location.hash = `groups?${query}`;
  };
  const [state, stateLabel] = choose("state", [["", "any"], ...STATES.map((s) => [s, s])], () => go({ state: state.value }));
  const [order, orderLabel] = choose("order", Object.entries(ORDERS), () => go({ order: order.value }));
  const version = h("input", { type: "number", min: 0, placeholder: "any", onchange: () => go({ version: version.value }) });
  const before = h("button", { type: "button", onclick: () => go({ page: page - 1 || "" }) }, "← previous");
  const after = h("button", { type: "button", onclick: () => go({ page: page + 1 }) }, "next →");
  const where = h("span", { class: "quiet", "data-figure": "groups_total" });
  const body = h("tbody");
  const head = [["group", 0], ["prompt", 0], ["state", 0], ["version", 0], ["step", 1], ["staleness", 1], ["reward", 1], ["samples", 1], ["tokens", 1], ["moves", 1], ["issued", 1], ["lasted", 1]]
    .map(([text, right]) => h("th", { class: right ? "num" : "", scope: "col" }, text));
  const node = h("section", { class: "card" },
    h("div", { class: "controls" }, stateLabel, h("label", {}, "version ", version), orderLabel, h("span", { class: "spring" }), where, before, after),
    h("table", {}, h("thead", {}, h("tr", {}, head)), body));
  let page = 0;

  function row(run, g) {
    const end = g.ended_s ?? run.now;
    const done = g.scored === run.group_size ? String(g.scored) : `${g.scored} of ${run.group_size}`;
    return h("tr", { class: "link", "data-group": g.group, onclick: () => { location.hash = `group/${g.group}/0`; } },
      h("td", {}, h("a", { href: `#group/${g.group}/0` }, `#${g.group}`)),
      h("td", { class: "prompt", title: g.text }, g.text || h("span", { class: "quiet" }, num(g.prompt))),
      h("td", {}, h("span", { class: `pill ${KINDS[g.state] ?? ""}` }, g.state)),
      h("td", {}, versionBadge(g.version)),
      h("td", { class: "num" }, g.step >= 0 ? g.step : g.fed_step >= 0 ? `→ ${g.fed_step}` : "–"),
      h("td", { class: "num" }, num(g.staleness)), h("td", { class: "num" }, num(g.reward)),
      h("td", { class: "num" }, done), h("td", { class: "num" }, num(g.tokens)), h("td", { class: "num" }, g.moves || "–"),
      h("td", { class: "num" }, seconds(g.issued_s)), h("td", { class: "num" }, seconds(end - g.issued_s)));
  }

  return {
    node,
    async refresh(run, { query: asked }) {
      for (const name of [...query.keys()]) query.delete(name);
      for (const [name, value] of asked) query.set(name, value);
      state.value = query.get("state") ?? "";
      order.value = query.get("order") ?? "newest";
      if (document.activeElement !== version) version.value = query.get("version") ?? "";
      const found = await get("groups", { ...Object.fromEntries(query), size: SIZE });
      page = found.page;
      const [first, last] = [found.page * found.size, Math.min(found.total, (found.page + 1) * found.size)];
      where.textContent = found.total ? `${num(first + 1)}–${num(last)} of ${num(found.total)}` : "no group";
      where.dataset.value = found.total;
      before.disabled = found.page === 0;
      after.disabled = last >= found.total;
      body.replaceChildren(...found.groups.map((g) => row(run, g)));
    },
  };
}

// -- one group ----------------------------------------------------------------------------------

// From likely (no colour) to surprising: steps of equal lightness, one hue.
const LIMITS = [-0.05, -0.4, -1, -2, -4];
const SHADES = [0, 0.16, 0.32, 0.5, 0.7, 0.9];
function shade(logprob) {
  const place = LIMITS.findIndex((limit) => logprob > limit);
  const strength = SHADES[place < 0 ? SHADES.length - 1 : place];
  return strength ? `rgb(230 120 0 / ${strength})` : "";
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");

function tokenNode(t, place, policy) {
  const text = t.pieces[place] ?? `[${t.token_ids[place]}]`;
  const logprob = t.logprobs?.[place];
  const node = h("span", { class: policy ? "token" : "token environment", "data-place": place }, visible(text === "" ? "·" : text));
  if (policy && logprob !== undefined) node.style.background = shade(logprob);
  return node;
}

// Runs of tokens that the policy or an environment wrote.
function turnsOf(t) {
  return t.turns?.length ? t.turns : [[0, t.token_ids?.length ?? 0, 1]];
}

function given(who, text) {
  return h("div", { class: "turn" }, h("div", { class: "who" }, who), h("span", { class: "given" }, visible(text)));
}

const askedFor = (text) => given("prompt, its beginning", text);

function tokensOf(t, asked) {
  const box = h("div", { class: "tokens" });
  if (t.prompt === undefined && asked) box.append(askedFor(asked));
  if (t.prompt !== undefined) box.append(given(`prompt · ${num(t.num_prompt)} tokens`, t.prompt));
  if (!t.token_ids?.length) {
    box.append(h("div", { class: "turn policy" }, h("div", { class: "who" }, "response"), visible(t.text ?? "")));
    return box;
  }
  const turns = turnsOf(t);
  let turn = 0;
  for (const [begin, end, policy] of turns) {
    const who = policy ? `response${turns.length > 1 ? `, turn ${(turn += 1)}` : ""} · ${num(end - begin)} tokens · trained on`
      : `environment · ${num(end - begin)} tokens · masked from the loss`;
    const nodes = [];
    for (let place = begin; place < end; place++) nodes.push(tokenNode(t, place, policy));
    box.append(h("div", { class: policy ? "turn policy" : "turn" }, h("div", { class: "who" }, who), nodes));
  }
  box.addEventListener("pointermove", (event) => {
    const place = event.target.dataset?.place;
    if (place === undefined) return tip("");
    const logprob = t.logprobs?.[place];
    const chance = logprob === undefined ? "" : `\nlog-prob ${logprob.toFixed(3)}, probability ${(100 * Math.exp(logprob)).toFixed(1)} %`;
    tip(`token ${place}, id ${t.token_ids[place]}${chance}`, event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", () => tip(""));
  return box;
}

// What each reward function gave, where there are several.
function partsOf(t) {
  const parts = Object.entries(t?.parts ?? {});
  return parts.length > 1 ? parts : [];
}

function scale() {
  return h("span", { class: "quiet" }, "surprising to the policy ",
    h("span", { class: "scale" }, SHADES.map((s) => h("i", { style: { background: s ? `rgb(230 120 0 / ${s})` : "var(--pale)" } }))));
}

export function group() {
  const head = h("div", { class: "controls" });
  const samples = h("div", { class: "samples" });
  const facts = h("div", { class: "controls" });
  const stays = h("tbody");
  const text = h("div", {});
  const node = h("div", { class: "grid" },
    h("section", { class: "card" }, head, samples, facts, text),
    h("section", { class: "card" }, h("h2", {}, "Where it ran"),
      h("table", {}, h("thead", {}, h("tr", {}, ["instance", "version", "from", "to", "began", "ended"].map((t) => h("th", { scope: "col" }, t)))), stays)));
  let shown = "";

  function heading(g) {
    const facts_ = [`prompt ${num(g.prompt)}`, g.step >= 0 ? `trained in step ${g.step}` : g.fed_step >= 0 ? `taken by step ${g.fed_step}` : "",
      g.staleness === null ? "" : `staleness ${g.staleness}`, `${num(g.tokens)} tokens`, g.moves ? `${g.moves} moves` : "", g.reason];
    head.replaceChildren(h("h2", { style: { margin: 0, fontSize: "16px" } }, `Group ${g.group}`), h("span", { class: `pill ${KINDS[g.state] ?? ""}` }, g.state),
      versionBadge(g.version), h("span", { class: "quiet" }, facts_.filter(Boolean).join(" · ")), h("span", { class: "spring" }),
      h("a", { href: `#timeline?group=${g.group}&at=${g.issued_s}&to=${g.ended_s ?? ""}` }, "in the timeline"), h("a", { href: "#groups" }, "all groups"));
  }

  function strip(g, chosen) {
    samples.replaceChildren(...g.samples.map((s) => h("a", { href: `#group/${g.group}/${s.sample}`, "aria-current": s.sample === chosen ? "true" : null },
      h("b", {}, `${s.sample}`), ` · ${s.reward === null ? "no reward" : `reward ${num(s.reward)}`} · ${num(s.tokens)} tokens`)));
  }

  function sampleFacts(g, s, t) {
    const parts = [["reward", num(s.reward), "reward"], ["tokens", num(s.tokens), "tokens"], ["ended by", s.finish || "still running", "finish"], ["version", "", "version"]];
    facts.replaceChildren(...parts.map(([label, value, name]) => h("span", { "data-figure": `sample_${name}` }, h("span", { class: "quiet" }, `${label} `),
      name === "version" ? versionBadge(g.version) : h("b", {}, value))), s.mixed ? h("span", { class: "pill bad" }, "several versions") : "",
      ...partsOf(t).map(([label, score]) => h("span", { class: "quiet" }, `${label} `, h("b", {}, num(score)))),
      t?.logprobs ? h("span", { class: "spring" }, scale()) : "");
  }

  return {
    node,
    async refresh(run, { rest }) {
      const [id, sample] = [Number(rest[0]), Number(rest[1] ?? 0)];
      const g = await get("group", { group: id });
      if (g === null) {
        head.replaceChildren(h("span", {}, `There is no group ${rest[0]}.`), h("a", { href: "#groups" }, "all groups"));
        for (const part of [samples, facts, stays, text]) part.replaceChildren();
        return;
      }
      const s = g.samples[sample] ?? g.samples[0];
      heading(g);
      strip(g, s.sample);
      stays.replaceChildren(...s.stays.map((stay) => h("tr", {}, h("td", {}, stay.instance), h("td", {}, versionBadge(stay.version)),
        h("td", {}, seconds(stay.begin)), h("td", {}, stay.ended === "running" ? "now" : seconds(stay.end)), h("td", {}, stay.began), h("td", {}, stay.ended))));
      const key = `${g.group}/${s.sample}/${g.state}/${s.finish}/${s.reward}`;
      if (key === shown) return;
      const t = await get("trajectory", { group: g.group, sample: s.sample });
      sampleFacts(g, s, t);
      const asked = h("div", { class: "tokens" }, askedFor(g.text));
      text.replaceChildren(...(t || !g.text ? [] : [asked]), t ? tokensOf(t, g.text) : h("div", { class: "empty" }, g.state === "trained"
        ? "Its text was not kept (logging.rollouts is off, or the run has no rollouts.jsonl)." : s.finish ? "Its text is no longer there: it is kept for groups that are trained." : "It is being generated; its text can be read when it has ended."));
      shown = key;
    },
  };
}
