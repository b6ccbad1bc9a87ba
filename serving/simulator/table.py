"""The comparison as a table."""

from collections.abc import Iterator, Mapping

from serving.simulator.experiment import GIB, Budget, Report, Savings

_HEADER = (
    "GiB", "policy", "parameters", "hit rate", "of ceiling", "of offline", "FLOPs saved", "of ceiling", "peak GiB",
    "end GiB", "evictions", "seconds",
)
_LEFT = ("policy", "parameters")


def table(report: Report) -> str:
    """Markdown that also reads well on a terminal."""
    rows = [_HEADER, *(row for budget in report.budgets for row in _rows(report, budget))]
    columns = []
    for name, *cells in zip(*rows):
        width = max(map(len, (name, *cells)))
        rule = ":" + "-" * (width - 1) if name in _LEFT else "-" * (width - 1) + ":"
        columns.append([rule, *(cell.ljust(width) if name in _LEFT else cell.rjust(width) for cell in (name, *cells))])
    rule, header, *body = ("| " + " | ".join(row) + " |" for row in zip(*columns))
    facts = (
        f"{report.num_requests:,} requests, {report.num_tokens:,} input tokens. An infinite cache hits "
        f"{_percent(report.whole_ceiling.tokens)} of them and saves {_percent(report.whole_ceiling.flops)} of the "
        f"prefill FLOPs;\non the second half {_percent(report.ceiling.tokens)} and {_percent(report.ceiling.flops)}. "
        "Parameters are fitted on the first half, savings are counted on the second.\n"
    )
    return "\n".join([facts, header, rule, *body])


def _rows(report: Report, budget: Budget) -> Iterator[tuple[str, ...]]:
    gib = f"{budget.gib:,g}"

    def shares(savings: Savings) -> tuple[str, ...]:
        return (
            _percent(savings.tokens), _share(savings.tokens, report.ceiling.tokens),
            _share(savings.tokens, budget.offline.tokens), _percent(savings.flops),
            _share(savings.flops, report.ceiling.flops),
        )

    for result in budget.results:
        yield (
            gib, result.title, _parameters(result.parameters), *shares(result.savings),
            f"{result.peak_bytes / GIB:,.1f}", f"{result.end_bytes / GIB:,.1f}", f"{result.evictions:,}",
            f"{result.seconds:.1f}",
        )
    yield (gib, "offline greedy", "", *shares(budget.offline), "", "", "", "")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _share(value: float, of: float) -> str:
    return f"{100 * value / of:.1f} %" if of else ""


def _parameters(parameters: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in parameters.items())
