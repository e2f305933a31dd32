// Who worked on which version when. The server sends one window: bins where it is wide, single
// stays where it is narrow. Between two answers the last one is drawn moved and scaled, so that
// panning and zooming stay fluid however long the run is.
import { COLOURS, css, get, h, inkOn, keepDrawn, num, prepare, seconds, ticks, tip, versionBadge, versionColour } from "./draw.js";

const LEFT = 112;
const TOP = 24;
const LEARNER = 30;
const GAP = 5;
const MAP = 30;
const HIGHEST = 104;
const SPAN_MIN = 0.02;

function rowHeight(count) {
  return Math.max(9, Math.min(HIGHEST, Math.floor(460 / Math.max(1, count)) - GAP));
}

function rgb(colour) {
  const text = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(text.slice(i, i + 2), 16));
}

// One pixel column per bin, all instances below each other; scaled when it is drawn.
function picture(data, tall) {
  const { num: width, data: text } = data.bins;
  const levels = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const count = data.instances.length;
  const canvas = new OffscreenCanvas(width, Math.max(1, count * tall));
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(canvas.width, canvas.height);
  const colours = Array.from({ length: COLOURS }, (_, c) => rgb(versionColour(c)));
  for (let row = 0; row < count; row++) {
    for (let x = 0; x < width; x++) {
      let filled = 0;
      for (let c = 0; c < COLOURS; c++) {
        const level = levels[(row * COLOURS + c) * width + x];
        if (!level) continue;
        const from = filled;
        filled = Math.min(tall, filled + Math.max((level / 255) * tall, 1));
        for (let y = Math.round(from); y < Math.round(filled); y++) {
          const at = ((row * tall + (tall - 1 - y)) * width + x) * 4;
          [image.data[at], image.data[at + 1], image.data[at + 2]] = colours[c];
          image.data[at + 3] = 235;
        }
      }
    }
  }
  pen.putImageData(image, 0, 0);
  return { canvas, levels };
}

export function timeline() {
  const canvas = h("canvas", { tabIndex: 0, role: "application", "aria-label": "timeline; arrow keys move, plus and minus zoom, 0 shows all" });
  const map = h("canvas", { id: "map", role: "img", "aria-label": "the whole run; drag to choose a window" });
  const legend = h("div", { class: "legend" });
  const facts = h("span", { class: "quiet", "data-figure": "timeline_facts" });
  const button = (text, label, onclick) => h("button", { type: "button", "aria-label": label, onclick }, text);
  const follow = h("button", { type: "button", onclick: () => { state.follow = !state.follow; state.view = null; ask(); } }, "");
  const node = h("div", { class: "grid" }, h("section", { class: "card timeline" },
    h("div", { class: "controls" }, h("h2", { style: { margin: 0 } }, "Timeline"), button("−", "zoom out", () => zoom(2)), button("+", "zoom in", () => zoom(0.5)),
      button("←", "earlier", () => pan(-0.3)), button("→", "later", () => pan(0.3)), button("all", "show the whole run", () => { state.follow = false; state.view = null; ask(); }),
      follow, h("span", { class: "spring" }), facts),
    canvas, map, legend,
    h("p", { class: "quiet" }, "Height is the number of requests running. Drag or arrow keys move; wheel, + and − zoom; click a request to read it.")));
  const state = { now: 0, view: null, data: null, image: null, whole: null, follow: false, marked: null, tail_s: 60 };

  const window_ = () => {
    if (state.view) return state.view;
    return state.follow ? [Math.max(0, state.now - state.tail_s), state.now] : [0, Math.max(state.now, SPAN_MIN)];
  };
  const wide = () => Math.max(50, canvas.clientWidth - LEFT - 4);
  const X = (time, [begin, end]) => LEFT + ((time - begin) / (end - begin)) * wide();
  const T = (x, [begin, end]) => begin + ((x - LEFT) / wide()) * (end - begin);
  const tall = () => rowHeight(state.data?.instances.length ?? 1);
  const rowTop = (row) => TOP + LEARNER + GAP + row * (tall() + GAP);

  // -- asking -----------------------------------------------------------------------------------
  let timer = 0;
  let running = false;
  function ask(delay = 0) {
    draw();
    clearTimeout(timer);
    timer = setTimeout(load, delay);
  }
  async function load() {
    if (running) return void (timer = setTimeout(load, 60));
    running = true;
    try {
      const [begin, end] = window_();
      const data = await get("timeline", { begin, end, width: Math.round(wide()) });
      state.data = data;
      state.now = data.now;
      state.image = data.bins ? picture(data, tall()) : null;
      if (!state.view && !state.follow) state.whole = data;
      state.whole ??= await get("timeline", { begin: 0, end: data.now, width: Math.round(wide()) });
      canvas.style.height = `${rowTop(data.instances.length) + 6}px`;
      canvas.dataset.stays = data.num_stays;
      canvas.dataset.moves = data.moves.num;
      canvas.dataset.begin = data.begin;
      canvas.dataset.end = data.end;
      showLegend();
      draw();
    } finally {
      running = false;
    }
  }

  function setView(begin, end) {
    const span = Math.max(SPAN_MIN, Math.min(end - begin, state.now * 1.02 || 1));
    const start = Math.max(-span * 0.02, Math.min(begin, state.now - span * 0.5));
    state.view = [start, start + span];
    ask(70);
  }
  function zoom(factor, at = null) {
    const view = window_();
    const middle = at ?? (view[0] + view[1]) / 2;
    setView(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  }
  function pan(share) {
    const [begin, end] = window_();
    setView(begin + share * (end - begin), end + share * (end - begin));
  }

  // -- drawing ----------------------------------------------------------------------------------
  function draw() {
    const data = state.data;
    const view = window_();
    const { pen, width, height } = prepare(canvas);
    if (!data || width < 80) return;
    axis(pen, view, width, height);
    labels(pen, data);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    rows(pen, data, view, width);
    if (data.bins) binned(pen, data, view);
    else single(pen, data, view);
    learner(pen, data, view);
    for (const load_ of data.loads) loading(pen, load_, view);
    migrations(pen, data, view);
    incidents(pen, data, view, height);
    pen.restore();
    drawMap();
  }

  function axis(pen, view, width, height) {
    pen.fillStyle = css("--soft");
    pen.strokeStyle = css("--line");
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    for (const t of ticks(view[0], view[1], width / 110)) {
      const x = X(t, view);
      if (x < LEFT) continue;
      pen.beginPath();
      pen.moveTo(x, TOP - 4);
      pen.lineTo(x, height);
      pen.stroke();
      const text = view[1] - view[0] < 10 ? `${t.toFixed(2)} s` : seconds(t);
      pen.fillText(text, Math.min(Math.max(x, LEFT + 20), width - 24), 13);
    }
  }

  function labels(pen, data) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = css("--ink");
    pen.fillText("learner", LEFT - 10, TOP + LEARNER / 2);
    const every = Math.ceil(11 / (tall() + GAP));
    data.instances.forEach((name, row) => {
      if (row % every) return;
      const text = name.length > 16 ? `…${name.slice(-15)}` : name;
      pen.fillText(text, LEFT - 10, rowTop(row) + tall() / 2);
    });
  }

  function rows(pen, data, view, width) {
    pen.fillStyle = css("--pale");
    pen.fillRect(LEFT, TOP, width - LEFT, LEARNER);
    data.instances.forEach((_, row) => pen.fillRect(LEFT, rowTop(row), width - LEFT, tall()));
    pen.fillStyle = css("--line");
    for (const [row, begin, end] of data.asleep) pen.fillRect(X(begin, view), rowTop(row), X(end, view) - X(begin, view), tall());
  }

  function binned(pen, data, view) {
    const [from, to] = [X(data.begin, view), X(data.end, view)];
    pen.imageSmoothingEnabled = false;
    data.instances.forEach((_, row) =>
      pen.drawImage(state.image.canvas, 0, row * tall(), state.image.canvas.width, tall(), from, rowTop(row), to - from, tall()));
  }

  function single(pen, data, view) {
    const s = data.stays;
    const deepest = s.lane.reduce((most, lane) => Math.max(most, lane + 1), 1);
    const size = tall() / deepest;
    const gap = size > 4 ? 1 : 0;
    for (let i = 0; i < s.begin.length; i++) {
      const x = X(s.begin[i], view);
      const y = rowTop(s.instance[i]) + tall() - (s.lane[i] + 1) * size;
      const long = Math.max(1, X(s.end[i], view) - x - (gap ? 0.5 : 0));
      pen.fillStyle = versionColour(s.version[i]);
      pen.globalAlpha = state.marked !== null && s.group[i] !== state.marked ? 0.28 : 1;
      pen.fillRect(x, y, long, Math.max(1, size - gap));
      if (size > 12 && long > 46) {
        pen.fillStyle = inkOn(versionColour(s.version[i]));
        pen.textAlign = "left";
        pen.textBaseline = "middle";
        pen.fillText(`${s.group[i]}·${s.sample[i]}`, Math.max(x, LEFT) + 4, y + size / 2);
      }
    }
    pen.globalAlpha = 1;
  }

  function learner(pen, data, view) {
    for (const [step, fed, closed, done] of data.steps) {
      const [a, b] = [X(fed ?? closed, view), X(closed ?? state.now, view)];
      const c = X(done ?? state.now, view);
      pen.fillStyle = versionColour(step);
      pen.globalAlpha = 0.35;
      pen.fillRect(a, TOP + LEARNER * 0.5, Math.max(0.5, b - a), LEARNER * 0.5);
      pen.globalAlpha = 1;
      if (closed !== null) pen.fillRect(b, TOP, Math.max(1, c - b - 0.5), LEARNER);
      if (c - a > 34) {
        pen.fillStyle = css("--ink");
        pen.textAlign = "left";
        pen.textBaseline = "middle";
        pen.fillText(`${step}`, Math.max(a, LEFT) + 3, TOP + LEARNER * 0.25);
      }
    }
    pen.fillStyle = css("--bad");
    for (const [, begin, end] of data.waits) pen.fillRect(X(begin, view), TOP + LEARNER - 3, Math.max(1.5, X(end, view) - X(begin, view)), 3);
  }

  function loading(pen, [row, version, begin, end], view) {
    const x = X(begin, view);
    const long = Math.max(3, X(end ?? state.now, view) - x);
    const y = rowTop(row);
    pen.fillStyle = css("--card");
    pen.fillRect(x, y, long, 6);
    pen.fillStyle = versionColour(version);
    pen.fillRect(x, y + 1, long, 4);
    pen.fillStyle = css("--ink");
    for (let at = x; at < x + long; at += 4) pen.fillRect(at, y + 1, 1, 4);
  }

  // Moves between the same two instances at about the same time are one curve, with their number.
  function migrations(pen, data, view) {
    const bundles = new Map();
    for (const [now, src, dst] of data.moves.rows) {
      const x = X(now, view);
      const key = `${Math.round(x / 6)} ${src} ${dst}`;
      if (x < LEFT - 6) continue;
      if (!bundles.has(key)) bundles.set(key, { x, src, dst, count: 0 });
      bundles.get(key).count += 1;
    }
    const faint = bundles.size > 60;
    pen.strokeStyle = pen.fillStyle = css("--ink");
    pen.textAlign = "left";
    for (const { x, src, dst, count } of bundles.values()) {
      const [from, to] = [rowTop(src) + tall() / 2, rowTop(dst) + tall() / 2];
      pen.globalAlpha = faint ? 0.3 : 0.75;
      pen.lineWidth = faint ? 0.8 : Math.min(3, 0.9 + Math.log2(count) * 0.3);
      pen.beginPath();
      pen.moveTo(x - 5, from);
      pen.bezierCurveTo(x + 3, from, x - 3, to, x + 5, to);
      pen.stroke();
      pen.beginPath();
      pen.arc(x + 5, to, 2.4, 0, 7);
      pen.fill();
      if (count > 1 && bundles.size < 40 && tall() > 20) pen.fillText(`${count}`, x + 10, to);
    }
    pen.globalAlpha = 1;
  }

  const SERIOUS = new Set(["lost", "restarted", "trainer lost", "resumed", "optimizer rewound"]);
  function incidents(pen, data, view, height) {
    for (const i of data.incidents) {
      if (!SERIOUS.has(i.kind)) continue;
      const row = data.instances.indexOf(i.instance);
      const [top, size] = row >= 0 ? [rowTop(row), tall()] : [TOP, i.instance === "learner" ? LEARNER : height];
      pen.fillStyle = css("--bad");
      pen.fillRect(X(i.now, view) - 1, top, 2, size);
      pen.beginPath();
      pen.arc(X(i.now, view), top + 3, 3.5, 0, 7);
      pen.fill();
    }
  }

  function drawMap() {
    map.style.height = `${MAP}px`;
    const { pen, width } = prepare(map);
    const whole = state.whole;
    pen.fillStyle = css("--pale");
    pen.fillRect(LEFT, 0, width - LEFT, MAP);
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText("whole run", LEFT - 10, MAP / 2);
    if (!whole) return;
    const all = [0, Math.max(state.now, SPAN_MIN)];
    for (const [step, fed, closed, done] of whole.steps) {
      pen.fillStyle = versionColour(step);
      pen.fillRect(X(closed ?? fed, all), 9, Math.max(1, X(done ?? state.now, all) - X(closed ?? fed, all)), MAP - 18);
    }
    const view = window_();
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1.5;
    pen.strokeRect(Math.max(LEFT, X(view[0], all)) + 1, 1, Math.max(4, X(view[1], all) - X(view[0], all)) - 2, MAP - 2);
  }

  function showLegend() {
    const d = state.data;
    const versions = d.versions.slice(-10);
    follow.textContent = state.follow ? "stop following" : "follow the end";
    facts.textContent = `${num(d.num_stays)} requests, ${num(d.moves.num)} migrations, ${num(d.loads.length)} loads in ${seconds(d.end - d.begin)}`;
    const sign = (colour, text) => h("span", {}, h("i", { style: { background: colour } }), text);
    legend.replaceChildren(h("span", {}, d.versions.length > 10 ? "… " : "", ...versions.flatMap((v) => [versionBadge(v), " "])),
      sign(css("--pale"), "idle"), sign(css("--line"), "asleep"), sign(css("--ink"), "migration, load of weights (hatched)"), sign(css("--bad"), "trainer waits for an older group; losses"),
      h("span", {}, "learner: light while a batch fills, full while it trains"));
  }

  // -- pointing ---------------------------------------------------------------------------------
  function under(x, y) {
    const [d, view] = [state.data, window_()];
    if (!d || x < LEFT) return null;
    const time = T(x, view);
    const near = ((view[1] - view[0]) / wide()) * 5;
    for (const i of d.incidents) if (Math.abs(i.now - time) < near && y < 16 + TOP + d.instances.length * (tall() + GAP) + LEARNER && SERIOUS.has(i.kind)) return { text: `${i.instance} ${i.kind}\n${i.text}` };
    if (y >= TOP && y < TOP + LEARNER) return underLearner(d, time);
    const row = Math.floor((y - rowTop(0)) / (tall() + GAP));
    if (row < 0 || row >= d.instances.length) return null;
    const load_ = d.loads.find((l) => l[0] === row && y < rowTop(row) + 8 && l[2] - near < time && time < (l[3] ?? state.now) + near);
    if (load_) return { text: `${d.instances[row]} loads version ${load_[1]}\n${load_[4] ? `from ${load_[4]}` : "from the store"}, ${seconds((load_[3] ?? state.now) - load_[2])}${load_[5] ? `\nfailed: ${load_[5]}` : ""}` };
    const move = d.moves.rows.find((m) => Math.abs(m[0] - time) < near && (m[1] === row || m[2] === row));
    if (move) return { text: `group ${move[3]} sample ${move[4]} (version ${move[5]})\nmoves from ${d.instances[move[1]]} to ${d.instances[move[2]]}`, group: move[3], sample: move[4] };
    return d.stays ? underStay(d, row, time, y) : underBin(d, row, time);
  }
  function underLearner(d, time) {
    const wait = d.waits.find((w) => w[1] <= time && time <= w[2]);
    const step = d.steps.find((s) => (s[1] ?? s[2]) <= time && time <= (s[3] ?? state.now));
    const lines = step ? [`step ${step[0]}: filling ${seconds((step[2] ?? state.now) - step[1])}`, step[2] === null ? "" : `training ${seconds((step[3] ?? state.now) - step[2])}`] : ["idle"];
    if (wait) lines.push(`step ${wait[0]} waits for group ${wait[3].join(", ")}`);
    return { text: lines.filter(Boolean).join("\n") };
  }
  function underStay(d, row, time, y) {
    const s = d.stays;
    const deepest = s.lane.reduce((most, lane) => Math.max(most, lane + 1), 1);
    const lane = Math.floor(((rowTop(row) + tall() - y) / tall()) * deepest);
    for (let i = 0; i < s.begin.length; i++) {
      if (s.instance[i] === row && s.lane[i] === lane && s.begin[i] <= time && time <= s.end[i]) {
        return { text: `group ${s.group[i]} sample ${s.sample[i]}, version ${s.version[i]}\n${seconds(s.end[i] - s.begin[i])} on ${d.instances[row]}`, group: s.group[i], sample: s.sample[i] };
      }
    }
    return { text: `${d.instances[row]}\n${seconds(time)}` };
  }
  function underBin(d, row, time) {
    const bin = Math.floor(((time - d.begin) / (d.end - d.begin)) * d.bins.num);
    if (bin < 0 || bin >= d.bins.num) return null;
    let total = 0;
    for (let c = 0; c < COLOURS; c++) total += state.image.levels[(row * COLOURS + c) * d.bins.num + bin];
    return { text: `${d.instances[row]} at ${seconds(time)}\n${num((total / 255) * d.bins.most, 2)} requests running` };
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (e) => { drag = { x: e.offsetX, view: window_(), moved: false }; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    if (drag) {
      const shift = ((drag.x - e.offsetX) / wide()) * (drag.view[1] - drag.view[0]);
      if (Math.abs(drag.x - e.offsetX) > 3) drag.moved = true;
      if (!drag.moved) return;
      canvas.classList.add("dragging");
      tip("");
      return setView(drag.view[0] + shift, drag.view[1] + shift);
    }
    const found = under(e.offsetX, e.offsetY);
    tip(found?.text ?? "", e.clientX, e.clientY);
  });
  canvas.addEventListener("pointerup", (e) => {
    const clicked = drag && !drag.moved;
    drag = null;
    canvas.classList.remove("dragging");
    const found = clicked ? under(e.offsetX, e.offsetY) : null;
    if (found?.group !== undefined) { tip(""); location.hash = `group/${found.group}/${found.sample}`; }
  });
  canvas.addEventListener("pointerleave", () => tip(""));
  canvas.addEventListener("dblclick", (e) => zoom(0.4, T(e.offsetX, window_())));
  canvas.addEventListener("wheel", (e) => {
    const fits = canvas.clientHeight < innerHeight * 0.85;
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); return pan(e.deltaX / 1200); }
    if (!fits && !e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) / 150), T(e.offsetX, window_()));
  }, { passive: false });
  canvas.addEventListener("keydown", (e) => {
    const keys = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => { state.view = null; state.follow = false; ask(); },
      Home: () => setView(0, window_()[1] - window_()[0]), End: () => setView(state.now - (window_()[1] - window_()[0]), state.now) };
    if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
  });
  const choose = (e) => {
    if (!(e.buttons & 1)) return;
    const [begin, end] = window_();
    const middle = T(e.offsetX, [0, Math.max(state.now, SPAN_MIN)]);
    const span = state.view ? end - begin : (end - begin) / 5;
    setView(middle - span / 2, middle + span / 2);
  };
  map.addEventListener("pointerdown", choose);
  map.addEventListener("pointermove", choose);
  keepDrawn(canvas, () => ask(40));

  return {
    node,
    async refresh(run, { query }) {
      const group = query.get("group");
      if (group !== null && state.marked !== Number(group)) {
        state.marked = Number(group);
        const [from, to] = [Number(query.get("at") || 0), Number(query.get("to") || run.now)];
        state.view = [Math.max(0, from - 0.1 * (to - from)), to + 0.1 * (to - from)];
      } else if (group === null) state.marked = null;
      state.now = run.now;
      state.tail_s = Math.max(10, run.now / Math.max(1, run.step) * 6);
      if (!state.data || !state.view || state.data.end > state.now - 1 || state.view[1] > state.data.end) await load();
    },
  };
}
