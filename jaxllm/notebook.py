"""Notebook views of objects that cannot define `_repr_html_`: JAX's mesh, a plan and the reports of `inspect` and `compile`,
whose texts are made in a higher layer.

Config, model and estimate define their own. `import jaxllm` in a notebook registers the plan and the reports; jaxllm.api, which
imports JAX, registers the mesh.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from jaxllm.display import preformatted, table

if TYPE_CHECKING:
    from jax.sharding import Mesh

MOST_ROWS = 16


def register() -> None:
    """Registers the views in this process's notebook or IPython. Does nothing elsewhere."""
    # In a notebook IPython is already imported.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        # By name, because few notebooks import the planner or the compiler's part of jaxllm.
        formatter.for_type_by_name("jaxllm.plan.plan_result", "Plan", plan_html)
        formatter.for_type_by_name("jaxllm.compile.inspect", "Report", report_html)
        formatter.for_type_by_name("jaxllm.compile.report", "CompileReport", report_html)
        formatter.for_type_by_name("jaxllm.run.trainer", "Trainer", trainer_html)
        if "jax" in sys.modules:
            from jax.sharding import Mesh

            formatter.for_type(Mesh, mesh_html)


def mesh_html(mesh: Mesh) -> str:
    """Table of device ids: columns along the fastest axis longer than 1, a row for each position on the slower axes. With
    several processes each id is followed by its process.
    """
    used = {axis: size for axis, size in mesh.shape.items() if size > 1} or {mesh.axis_names[-1]: 1}
    *slow, fast = used
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    cells = [f"{device.id} @{device.process_index}" if several else str(device.id) for device in mesh.devices.flat]
    width = used[fast]
    rows = [
        [", ".join(f"{axis} {i}" for axis, i in zip(slow, place, strict=True)), *cells[n * width : (n + 1) * width]]
        for n, place in enumerate(itertools.product(*(range(used[axis]) for axis in slow)))
    ]
    shown = rows if len(rows) <= MOST_ROWS else [*rows[: MOST_ROWS - 1], ["..."] * (width + 1)]
    kind = mesh.devices.flat[0].device_kind
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    caption = f"{mesh.size} {kind} device{'s' if mesh.size > 1 else ''}, slow network to fast: {sizes}"
    return table(shown, ["", *(f"{fast} {i}" for i in range(width))], caption=caption)


def plan_html(plan: Any) -> str:
    """The heading, the best candidates and what was left out."""
    from jaxllm.plan.search_text import as_html

    return as_html(plan)


def trainer_html(trainer: Any) -> str:
    """Its step, and what `fit` prints before the first one."""
    from jaxllm.run.messages import header

    return preformatted("\n".join([f"step {trainer.step} of {trainer.config.train.steps}", *header(trainer)]))


def report_html(report: Any) -> str:
    """The output of `jaxllm inspect` or of `jaxllm compile`."""
    from jaxllm.compile.text import in_columns, render, render_inspect

    return preformatted(in_columns((render_inspect if type(report).__name__ == "Report" else render)(report)))
