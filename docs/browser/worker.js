// One Python: it starts, then answers one question after another. The page has two, so that an estimate never waits for a plan.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const SITE = "/packages";

async function start() {
  const [python, packages, planner] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href }),
    fetched("packages.zip").then((reply) => reply.arrayBuffer()),
    fetched("planner.py").then((reply) => reply.text()),
  ]);
  python.FS.mkdir(SITE);
  python.unpackArchive(packages, "zip", { extractDir: SITE });
  python.FS.writeFile(`${SITE}/planner.py`, planner);
  python.runPython(`import sys; sys.path.insert(0, "${SITE}"); import planner`);
  return python.runPython("planner.answer");
}

async function fetched(name) {
  const reply = await fetch(new URL(name, import.meta.url));
  if (!reply.ok) throw new Error(`${name} is missing (${reply.status}): build the page again.`);
  return reply;
}

const ready = start();
ready.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error.message ?? error) }));

onmessage = async ({ data: { id, kind, request } }) => {
  const answer = await ready;
  let last = 0;
  const progress = (what, done, total) => {
    if (done === total || performance.now() - last > 50) {
      last = performance.now();
      postMessage({ id, what, done, total });
    }
  };
  try {
    postMessage({ id, result: JSON.parse(answer(kind, JSON.stringify(request), progress)) });
  } catch (error) {
    // An error of Python's has its traceback as its message; the last line says what.
    postMessage({ id, result: { error: `The planner itself failed: ${String(error.message ?? error).trim().split("\n").pop()}` } });
  }
};
