"""The comparison as curves: hit rate against budget."""

import itertools
import pathlib

from serving.simulator import ours
from serving.simulator.experiment import Report

SUFFIXES = (".png", ".svg", ".pdf")
GREY = "0.45"
OURS = {"color": "#d1480b", "marker": "o", "markersize": 6.5, "linewidth": 2.5, "zorder": 3}
OTHERS = (
    {"color": "#a8851b", "marker": "v"}, {"color": "#2f6fb3", "marker": "s"},
    {"color": "#2a9384", "marker": "^", "linestyle": (0, (5, 2))}, {"color": "#8457b0", "marker": "D"},
)


def draw(axes, report: Report) -> None:
    """Draws a line for each policy on matplotlib axes, the ceiling and the offline bound for reference."""
    budgets = [budget.gib for budget in report.budgets]
    ceiling = 100 * report.ceiling.tokens
    axes.axhline(ceiling, color=GREY, linewidth=1, label=f"infinite cache ({ceiling:.1f} %)")
    axes.plot(
        budgets, [100 * budget.offline.tokens for budget in report.budgets], color=GREY, linewidth=1.2,
        linestyle=(0, (4, 3)), label="offline greedy",
    )
    others = itertools.cycle(OTHERS)
    for index, policy in enumerate(report.budgets[0].results):
        rates = [100 * budget.results[index].savings.tokens for budget in report.budgets]
        style = OURS if policy.name == ours.OURS.name else {"markersize": 4.5, "linewidth": 1.4, **next(others)}
        axes.plot(budgets, rates, label=policy.title, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{gib:,g}" for gib in budgets])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * ceiling)
    axes.set_xlabel("budget for snapshots and MLA pages (GiB)")
    axes.set_ylabel("input tokens found in the cache (%)")
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def save(path: pathlib.Path, report: Report, title: str) -> None:
    """Writes the picture to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    draw(axes, report)
    figure.savefig(path)
