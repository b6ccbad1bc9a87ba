"""Deliberate defects: a function of ours with a piece of its source replaced."""

import inspect
import textwrap


def break_source(monkeypatch, owner, name: str, old: str, new: str) -> None:
    """`owner.name` does what its source says once `old`, which is in it exactly once, is `new`."""
    function = vars(owner)[name]
    function = function.fget if isinstance(function, property) else function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has changed: what is this defect now?"
    namespace: dict = {}
    exec(compile(source.replace(old, new), f"<{name} with a defect>", "exec"), function.__globals__, namespace)
    monkeypatch.setattr(owner, name, namespace[function.__name__])
