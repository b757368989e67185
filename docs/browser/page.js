// The form, the link that holds it, and what the two workers answer. All numbers and sentences are Python's.
import { bars, cloud, element } from "./charts.js";

const WAIT_MS = 250;
const $ = (id) => document.getElementById(id);
const form = $("form");
const fields = [...document.querySelectorAll("[name]")].filter((field) => field.form === form);
const sizes = [...$("sizes").querySelectorAll("[name]")];
const settings = fields.filter((field) => field.name.includes(".") && !sizes.includes(field));
const byName = Object.fromEntries(fields.map((field) => [field.name, field]));
const defaults = { "model.name": "llama-3.1-8b", gpu: "h100-80gb" };
/** The last answers, whole. */
export const answers = (window.planner = { estimate: null, plan: null });

// ------------------------------------------------------------------------------------------------------------ workers

/** A worker that answers one question at a time; a newer question takes the place of one that still waits. */
class Asked {
  constructor(kind, onAnswer) {
    Object.assign(this, { kind, onAnswer, worker: null, id: 0, asking: false, next: null });
  }

  start() {
    this.worker = new Worker("worker.js", { type: "module" });
    this.worker.onmessage = ({ data }) => this.#hear(data);
    this.worker.onerror = (event) => this.#hear({ failed: event.message ?? "its files are missing" });
  }

  ask(request, onProgress = null) {
    if (!this.worker) this.start();
    if (this.asking) {
      this.next = [request, onProgress];
      return;
    }
    Object.assign(this, { asking: true, onProgress, request });
    this.worker.postMessage({ id: ++this.id, kind: this.kind, request });
  }

  stop() {
    this.worker?.terminate();
    Object.assign(this, { worker: null, asking: false, next: null });
  }

  #hear(data) {
    if (data.ready) return $("starting").hidden = true;
    if (data.failed) {
      $("starting").hidden = false;
      $("starting").className = "error";
      $("starting").textContent = `Python does not start in this browser: ${data.failed}`;
      endPlan();
      $("estimate").setAttribute("aria-busy", "false");
      return this.stop();
    }
    if (data.id !== this.id) return;
    if (!data.result) return this.onProgress?.(data);
    this.asking = false;
    const [next, request] = [this.next, this.request];
    this.next = null;
    if (next) this.ask(...next);
    else this.onAnswer(data.result, request);
  }
}

const estimator = new Asked("estimate", showEstimate);
const planner = new Asked("plan", showPlan);

// --------------------------------------------------------------------------------------------------------------- form

function request() {
  const chosen = (byName["model.name"].value ? settings : [...sizes, ...settings]).filter((field) => field.value.trim());
  const lines = byName.other.value.split("\n").map((line) => line.trim()).filter(Boolean);
  // Steps change no number here, and a config needs them.
  const given = ["train.steps=1000", ...chosen.map((field) => `${field.name}=${field.value.trim()}`), ...lines];
  return {
    settings: given,
    gpu: byName.gpu.value,
    gpus: byName.gpus.value,
    gpus_per_host: byName.gpus_per_host.value,
    objective: byName.objective.value,
  };
}

/** What a plan answers: all but the layout, which it searches. */
function question({ settings, ...on }) {
  const kept = settings.filter((setting) => !/^(parallel\.|train\.microbatch_sequences=)/.test(setting));
  return JSON.stringify([kept, on]);
}

/** What differs from the page as it opens, for the link. */
function toLink() {
  const link = new URLSearchParams();
  for (const field of fields) {
    const shown = !sizes.includes(field) || !byName["model.name"].value;
    if (shown && field.value !== field.initial) link.set(field.name, field.value);
  }
  if (answers.plan && $("stale").hidden) link.set("plan", "1");
  history.replaceState(null, "", link.size ? `#${link}` : location.pathname + location.search);
}

function fromLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) set(field, link.get(field.name) ?? field.initial);
  changed();
  if (link.get("plan")) startPlan();
}

function set(field, value) {
  // What a list has not, such as a mapping of tensors to keep, becomes a choice; jaxllm refuses what does not exist.
  if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) field.add(new Option(value));
  field.value = value;
}

/** Takes key=value strings into their fields; what has no field goes to the other settings. */
function take(given) {
  const others = new Map(byName.other.value.split("\n").filter((line) => line.trim()).map((line) => [line.split("=")[0].trim(), line]));
  for (const setting of given) {
    const [key, value] = [setting.slice(0, setting.indexOf("=")), setting.slice(setting.indexOf("=") + 1)];
    others.delete(key);
    const field = byName[key];
    if (field) set(field, value);
    else others.set(key, setting);
  }
  byName.other.value = [...others.values()].join("\n");
}

let waiting = null;
function changed() {
  $("sizes").hidden = byName["model.name"].value !== "";
  clearTimeout(waiting);
  $("estimate").setAttribute("aria-busy", "true");
  waiting = setTimeout(() => {
    const asked = request();
    $("stale").hidden = !answers.plan || question(asked) === answers.planned;
    toLink();
    estimator.ask(asked);
  }, WAIT_MS);
}

function complain(sentence) {
  for (const old of document.querySelectorAll(".complaint")) old.remove();
  for (const field of fields) field.removeAttribute("aria-invalid");
  if (!sentence) return;
  // The key that the sentence names first is the one to look at.
  const named = fields.map((field) => [place(sentence, field.name), field]).filter(([where]) => where >= 0).sort((a, b) => a[0] - b[0]);
  const field = named[0]?.[1];
  if (!field || (sizes.includes(field) && $("sizes").hidden)) return;
  field.setAttribute("aria-invalid", "true");
  const note = element("p", { class: "complaint error", id: "complaint" }, sentence);
  field.setAttribute("aria-errormessage", note.id);
  field.closest(".field, .actions").append(note);
}

function place(sentence, name) {
  return sentence.search(new RegExp(name.includes(".") ? `${name.replace(".", "\\.")}\\b` : `--${name.replaceAll("_", "-")}\\b(?!-)`));
}

// ------------------------------------------------------------------------------------------------------------ answers

function showEstimate(found) {
  answers.estimate = found;
  $("estimate").setAttribute("aria-busy", "false");
  complain(found.error);
  $("verdict").className = found.error ? "error" : found.fits ? "fits" : "over";
  $("verdict").textContent = found.error ?? `${found.fits ? "Fits" : "Does not fit"}: ${found.verdict}`;
  for (const id of ["estimate-json", "copy-recipe", "save-recipe"]) $(id).disabled = Boolean(found.error);
  $("speed").replaceChildren();
  if (found.error) {
    for (const id of ["memory", "time", "lines", "recipe"]) $(id).replaceChildren();
    $("changes").hidden = true;
    return;
  }
  if (byName["model.name"].value) for (const field of sizes) set(field, found.sizes[field.name]);
  for (const [name, value] of Object.entries(found.speed ?? {})) {
    $("speed").append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  }
  pictures();
  $("changes").hidden = !found.changes.length;
  $("changes").querySelector("ul").replaceChildren(
    ...found.changes.map((change) => {
      const use = element("button", { type: "button" }, "Use");
      use.setAttribute("aria-label", `Use ${change.text}`);
      use.onclick = () => {
        take(change.settings);
        changed();
      };
      return element("li", {}, use, element("span", {}, element("code", {}, change.text), ` ${change.figures}`));
    }),
  );
  $("lines").textContent = found.lines;
  $("recipe").textContent = found.recipe;
}

function pictures() {
  const { estimate, plan } = answers;
  if (estimate && !estimate.error) {
    bars($("memory"), "Bytes of the fullest GPU", estimate.bytes, estimate.total, estimate.capacity);
    bars($("time"), "Seconds of one step", estimate.seconds, { value: sum(estimate.seconds), text: `${estimate.speed?.["seconds a step"]} s` });
  }
  if (plan && !plan.error) cloud($("cloud"), plan.points, plan.rows.length);
}

const sum = (parts) => parts.reduce((total, part) => total + part.value, 0);

function startPlan() {
  $("run-plan").disabled = true;
  $("stop-plan").hidden = $("progress").hidden = false;
  $("plan-said").textContent = "";
  $("progress-text").textContent = planner.worker ? "" : "Python starts once more, so that estimates go on";
  $("bar").removeAttribute("value");
  $("planned").hidden = true;
  answers.plan = null;
  planner.ask(request(), ({ what, done, total }) => {
    Object.assign($("bar"), { max: total, value: done });
    // After the last: ranking, or if nothing fits the search for what would.
    $("progress-text").textContent = `${done} of ${total} ${what}${done === total ? ", almost there" : ""}`;
  });
}

function endPlan() {
  $("run-plan").disabled = false;
  $("stop-plan").hidden = $("progress").hidden = true;
}

function showPlan(found, asked) {
  endPlan();
  Object.assign(answers, { plan: found, planned: question(asked) });
  $("stale").hidden = question(request()) === answers.planned;
  toLink();
  $("plan-said").className = found.error ? "error" : "";
  $("plan-said").textContent = found.error ?? found.counts;
  $("planned").hidden = Boolean(found.error);
  if (found.error) return;
  $("plan-notes").replaceChildren(...found.notes.map((note) => element("li", {}, note)));
  $("best").caption.textContent = `${found.looked_for}: the first ${found.rows.length}`;
  $("best").tBodies[0].replaceChildren(
    ...found.rows.map((row, index) => {
      const use = element("button", { type: "button", "aria-label": `Use layout ${index + 1}` }, "Use");
      use.onclick = () => {
        // The question of the plan too, which may have changed since.
        take([...asked.settings.filter((setting) => byName[setting.split("=")[0]]), ...row.settings]);
        set(byName.gpu, asked.gpu);
        set(byName.gpus, row.gpus);
        changed();
        $("estimate-title").scrollIntoView({ block: "start" });
      };
      // Roles, because a phone lays rows out as cards.
      const cell = (kind, content, label = "") => element("td", { class: kind, role: "cell", "data-label": label }, content);
      return element(
        "tr",
        { role: "row" },
        element("th", { scope: "row", role: "rowheader" }, String(index + 1)),
        cell("text", row.layout),
        cell("figure", row.memory, "Memory, of capacity"),
        cell("figure", row.tokens, "tokens/s/GPU"),
        cell("wide-only", row.tflops),
        cell("use", use),
      );
    }),
  );
  $("rejected").replaceChildren(...found.rejected.map((line) => element("li", {}, line)));
  pictures();
}

// ------------------------------------------------------------------------------------------------------------ buttons

async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
    $(said).textContent = "Copied.";
  } catch {
    $(said).textContent = "This browser does not let a page copy: select it by hand.";
  }
  setTimeout(() => ($(said).textContent = ""), 4000);
}

function save(text, name, type) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

$("copy-link").onclick = () => {
  toLink();
  copy(location.href, "link-said");
};
$("copy-recipe").onclick = () => copy(answers.estimate.recipe, "recipe-said");
$("save-recipe").onclick = () => save(answers.estimate.recipe, "recipe.yaml", "application/yaml");
$("estimate-json").onclick = () => save(answers.estimate.json, "estimate.json", "application/json");
$("plan-json").onclick = () => save(answers.plan.json, "plan.json", "application/json");
$("run-plan").onclick = startPlan;
$("stop-plan").onclick = () => {
  planner.stop();
  endPlan();
  $("plan-said").textContent = "Stopped.";
  // Starting Python takes seconds.
  planner.start();
};
form.onsubmit = (event) => event.preventDefault();
form.onreset = () => {
  history.replaceState(null, "", location.pathname + location.search);
  setTimeout(fromLink);
};
document.addEventListener("input", (event) => {
  if (fields.includes(event.target)) changed();
});
addEventListener("hashchange", fromLink);
addEventListener("resize", pictures);

for (const field of fields) {
  if (field.name in defaults) field.value = defaults[field.name];
  field.initial = field.value;
}
estimator.start();
fromLink();
