// The page: which view is open, the header, and the stream that says when something has moved.
import { chosen, get, h, num, percent, seconds } from "./draw.js";
import { distributions, learning, overview, throughput } from "./views.js";
import { timeline } from "./timeline.js";
import { group, groups } from "./groups.js";
import { compare, config, namesOf } from "./runs.js";

const makers = { overview, timeline, learning, distributions, throughput, groups, group, compare, config };
const made = {};
const main = document.getElementById("main");
let open = null;

function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [name, ...rest] = (path || "overview").split("/");
  return { name: name in makers ? name : "overview", rest, query: new URLSearchParams(query) };
}

async function show() {
  const where = route();
  made[where.name] ??= makers[where.name]();
  open = made[where.name];
  const tab = where.name === "group" ? "groups" : where.name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${tab}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (main.firstChild !== open.node) main.replaceChildren(open.node);
  await refresh(where);
}

// One refresh at a time; what comes meanwhile makes one more.
let busy = false;
let again = false;
async function refresh(where = route()) {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const run = await get("overview");
    header(run);
    await open.refresh(run, where);
    document.body.dataset.revision = run.revision;
    document.body.dataset.view = where.name;
  } catch (error) {
    pill("stopped", `cannot read: ${error.message}`);
  } finally {
    busy = false;
    if (again) {
      again = false;
      refresh();
    }
  }
}

function pill(kind, text) {
  const node = document.getElementById("status");
  node.className = `pill ${kind}`;
  node.textContent = text;
}

const MEANING = { live: "live", finished: "finished", stopped: "stopped, resumable", silent: "silent" };

function header(run) {
  document.title = `${run.name} · dora-rl`;
  document.getElementById("run-name").textContent = run.name;
  document.getElementById("mode").textContent =
    `${run.mode}, K = ${run.max_staleness}, ${run.batch_groups} × ${run.group_size} a step`;
  if (run.error) pill("bad", run.error);
  else pill(run.status, MEANING[run.status]);
  document.getElementById("status").title = run.stop;
  const share = run.num_steps ? run.step / run.num_steps : 0;
  document.getElementById("progress-text").textContent =
    `step ${num(run.step)} of ${num(run.num_steps)} · ${seconds(run.now)}`;
  const bar = document.getElementById("progress-bar");
  bar.style.width = percent(Math.min(1, share)).replace(" ", "");
  bar.parentElement.setAttribute("aria-valuenow", run.step);
  bar.parentElement.setAttribute("aria-valuemax", run.num_steps);
  document.getElementById("reading").textContent =
    run.share_read < 1 ? `reading the log, ${Math.floor(100 * run.share_read)} %` : "";
  document.body.dataset.read = run.share_read < 1 ? "part" : "all";
}

// Which run: another one is another page, so that an address can be kept and two can be open.
async function chooser() {
  const runs = await get("runs");
  const select = document.getElementById("runs");
  const options = namesOf(runs).map((name, i) => h("option", { value: i, selected: i === chosen.run }, name));
  select.replaceChildren(...options);
  document.body.classList.toggle("several", runs.length > 1);  // the selector then names the run
  select.hidden = document.querySelector('nav a[href="#compare"]').hidden = runs.length < 2;
  select.onchange = () => { location.href = `?run=${select.value}${location.hash}`; };
}

addEventListener("hashchange", show);
const stream = new EventSource(`api/live?run=${chosen.run}`);
stream.onmessage = () => refresh();
stream.onerror = () => pill("silent", "the dashboard has ended");
// Other runs move without a word on this stream.
const COMPARED_MS = 5000;
setInterval(() => route().name === "compare" && refresh(), COMPARED_MS);
chooser();
show();
