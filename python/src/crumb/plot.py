# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Plots of measurements by `crumb-bench quality --json`, for notebooks. Needs matplotlib.

    from crumb import plot
    plot.quality("quality.json")                 # KL divergence over bits, one point a method
    plot.quality("quality.json", metric="top1", context=4096)
"""

import json
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

Report = Union[str, "os.PathLike[str]", Mapping[str, Any]]

# metric: (label of its axis, whether the axis is logarithmic). Each row of a report has the
# standard error of a metric under the metric's name and "_error".
_METRICS = {
    "kl": ("KL divergence from the exact model (nats a token)", True),
    "ppl": ("perplexity", False),
    "top1": ("share of tokens whose likeliest successor is that of the exact model", False),
    "passkey": ("share of passkeys that are recalled", False),
}


def rows(report: Report, context: Optional[int] = None, metric: str = "kl",
         methods: Optional[Sequence[str]] = None) -> List[Dict[str, Any]]:
    """The rows of a report that `quality` plots: those of one context that have the metric.

    report: the file that crumb-bench wrote, or its contents. context: tokens; the longest one of
    the report if None. methods: their names, in the wanted order; all of the report if None. Raises
    ValueError for a context, metric or method that the report lacks, and names those that it has.
    """
    if metric not in _METRICS:
        raise ValueError(f"there is no metric {metric!r}; there are {', '.join(_METRICS)}")
    if not isinstance(report, Mapping):
        with open(report, encoding="utf-8") as file:
            report = json.load(file)
    if not isinstance(report, Mapping) or not isinstance(report.get("rows"), list):
        raise ValueError("this is not a report of crumb-bench quality: it has no list of rows")
    measured = [row for row in report["rows"] if metric in row]
    if not measured:
        raise ValueError(f"the report has no figures of {metric!r}")
    contexts = sorted({row["context"] for row in measured})
    if context is None:
        context = contexts[-1]
    if context not in contexts:
        raise ValueError(f"the report has contexts {contexts}, and not {context}")
    found = {row["method"]: row for row in measured if row["context"] == context}
    missing = [name for name in methods or () if name not in found]
    if missing:
        raise ValueError(f"the report has methods {', '.join(found)}, and not {', '.join(missing)}")
    return [found[name] for name in (found if methods is None else methods)]


def quality(report: Report, *, context: Optional[int] = None, metric: str = "kl",
            methods: Optional[Sequence[str]] = None, axes: Any = None) -> Any:
    """Draws a metric of every method over the bits of a stored element, and returns the axes.

    The bars are standard errors over the measured sequences. report, context, metric and methods:
    see `rows`. axes: matplotlib axes to draw into; the current ones if None.
    """
    chosen = rows(report, context, metric, methods)
    if axes is None:
        from matplotlib import pyplot
        axes = pyplot.gca()
    label, logarithmic = _METRICS[metric]
    for row in chosen:
        axes.errorbar([row["bits"]], [row[metric]], yerr=[row.get(f"{metric}_error", 0.0)],
                      marker="o", capsize=3, linestyle="none", label=row["method"])
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel("bits of a stored element")
    axes.set_ylabel(label)
    axes.set_title(f"{chosen[0]['context']:,} tokens")
    axes.legend()
    return axes
